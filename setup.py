import json
from pathlib import Path

from setuptools import find_packages, setup


HERE = Path(__file__).parent
PINS = json.loads((HERE / "torch_overlay" / "pins.json").read_text(encoding="utf-8"))
OLDEST = next(iter(PINS["releases"]))
MODELS = ["transformers==5.24.0"]
PLOT = ["matplotlib>=3.8", "scipy>=1.11"]
TEST = [
    "expecttest>=0.3",
    "hypothesis>=6.100",
    "pytest>=8",
    "pytest-xdist>=3.5",
    "ruff==0.17.6",
]
CURVE = ["tabulate>=0.9", "tqdm>=4.66", "filelock>=3.13", "numpy>=1.26"]

setup(
    name="torch_overlay",
    version="0.1.0",
    description="Fixes for PyTorch's activation-memory budget, as an overlay",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    packages=find_packages(include=["torch_overlay", "torch_overlay.*"]),
    package_data={"torch_overlay": ["pins.json"]},
    python_requires=">=3.10",
    install_requires=[f"torch>={OLDEST}"],
    extras_require={
        "models": MODELS,
        "plot": PLOT + CURVE,
        "test": TEST + MODELS + PLOT + CURVE,
    },
    entry_points={
        "torch.backends": ["torch_overlay = torch_overlay._autoload:autoload"],
    },
)
