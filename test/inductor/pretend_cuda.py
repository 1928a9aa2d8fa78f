"""Triton kernels that Inductor would generate for a CUDA device, without one.

:func:`triton_code` lowers a function of fake CUDA tensors; :func:`interpreted` runs the
generated wrapper on CPU tensors in Triton's interpreter, with chosen block sizes
(``TRITON_INTERPRET=1`` must be set before Triton is imported); :func:`instructions`
compiles a kernel for sm_90 and disassembles it.
"""

import ast
import contextlib
import importlib.util
import itertools
import linecache
import re
import subprocess
import tempfile
import types
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.codegen.triton
import torch._inductor.select_algorithm as select_algorithm
import torch.utils._triton
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton.backends.compiler import GPUTarget


TARGET = GPUTarget("cuda", 90, 32)
DEVICE = types.SimpleNamespace(
    name="pretend sm_90",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    cc=90,
    gcnArchName="",
    is_integrated=0,
    warp_size=32,
    multi_processor_count=132,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    total_memory=141 * 2**30,
)


def layout(*shape, stride=None, dtype=torch.float32):
    """A meta tensor; contiguous unless strides are given."""
    stride = stride or torch.empty(shape, device="meta").stride()
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def always(value):
    return staticmethod(lambda *args, **kwargs: value)


def forget_answers():
    """What torch remembers of Triton and the device."""
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def pretend_cuda():
    """Inductor sees one sm_90 device; nothing can run on it."""
    driver = types.SimpleNamespace(get_current_target=lambda: TARGET)
    replaced = [
        (torch.cuda, "get_device_properties", lambda *args: DEVICE),
        (torch.cuda, "get_device_capability", lambda *args: (9, 0)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "_lazy_init", lambda: None),
        (CudaInterface, "is_available", always(True)),
        (CudaInterface, "is_bf16_supported", always(True)),
        (CudaInterface, "is_triton_capable", always(True)),
        (CudaInterface, "current_device", always(0)),
        (CudaInterface, "device_count", always(1)),
        (CudaInterface, "get_device_properties", always(DEVICE)),
        (CudaInterface, "get_compute_capability", always(90)),
        (CudaInterface.Worker, "get_device_properties", always(DEVICE)),
        (CudaInterface.Worker, "current_device", always(0)),
        (torch.utils._triton, "triton_hash_with_backend", lambda: "none"),
        (triton.runtime.driver, "_active", driver),
    ]
    with contextlib.ExitStack() as stack:
        forget_answers()
        stack.callback(forget_answers)
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def first_triton_template(self, name, choices, input_nodes, layout, **kwargs):
    """Stands for autotuning: takes the first Triton template."""
    choice = next(
        c for c in choices if isinstance(c, select_algorithm.TritonTemplateCaller)
    )
    return choice.output_node(), choice


def fake_inputs(env, tensors, dynamic):
    """CUDA twins of meta tensors; ``dynamic`` makes equal sizes one symbol each."""
    symbols = {}

    def size(hint):
        if not dynamic:
            return hint
        if hint not in symbols:
            source = ConstantSource(f"size{hint}")
            symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            symbols[hint] = env.create_symintnode(symbol, hint=hint, source=source)
        return symbols[hint]

    found = []
    for t in tensors:
        if dynamic:
            sizes = [size(s) for s in t.shape]
            found.append(torch.empty(sizes, dtype=t.dtype, device="cuda:0"))
        else:
            layout = (t.shape, t.stride())
            found.append(torch.empty_strided(*layout, dtype=t.dtype, device="cuda:0"))
    return found


def triton_code(fn, *tensors, dynamic=False, **options):
    """Wrapper source for ``fn`` of tensors with the layouts of meta ``tensors``."""
    settings = {"compile_threads": 1, "joint_graph_constant_folding": False, **options}
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    with (
        pretend_cuda(),
        config.patch(settings),
        mock.patch.object(
            select_algorithm.AlgorithmSelectorCache, "__call__", first_triton_template
        ),
    ):
        with mode:
            inputs = fake_inputs(env, tensors, dynamic)
        gm = make_fx(
            fn,
            decomposition_table=select_decomp_table(),
            tracing_mode="symbolic" if dynamic else "fake",
        )(*inputs)
        with V.set_fake_mode(mode):
            joint_graph_passes(gm)
            graph = GraphLowering(gm, example_inputs=inputs, shape_env=env)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.run(*inputs)
                wrapper, _ = graph.codegen()
    return wrapper.value


def kernels(code):
    """Name and source of every Triton kernel in a wrapper."""
    return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S)


def bare(source):
    """A kernel's source without its heuristics decorator."""
    decorator = r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton\.jit)"
    source = re.sub(decorator, "", source, flags=re.S)
    return source.replace("triton_helpers.set_driver_to_gpu()", "")


def body(source):
    """The function of a kernel, from its decorator on."""
    return source[source.index("@triton.jit") :].strip()


_names = itertools.count()


def run_source(source, names):
    """Execute source so that ``inspect`` finds it; returns its globals."""
    filename = f"<generated {next(_names)}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    names.update(__name__=filename, __file__=filename)
    exec(compile(source, filename, "exec"), names)
    return names


class InterpretedKernel:
    """Launches one generated kernel in the interpreter, over its whole range."""

    def __init__(self, name, source, blocks):
        # The interpreter has no libdevice.
        source = bare(source).replace("libdevice.exp(", "tl.exp(")
        self.function = run_source(source, {})[name]
        self.blocks = blocks

    def run(self, *args, stream=None):
        names = self.function.arg_names
        given = dict(zip(names, args, strict=False))
        blocks = {n: self.blocks[n] for n in names if n.endswith("BLOCK")}

        def programs(axis):
            count = given.get(f"{axis}numel", 1)
            return -(-count // blocks.get(f"{axis.upper()}BLOCK", 1))

        self.function[tuple(map(programs, "xyz"))](*args, **blocks)


def interpreted(code, **blocks):
    """The wrapper's ``call`` on CPU tensors, every kernel run with these blocks."""
    code = re.split(r"\ndef (?:get_args|benchmark_compiled_module)\b", code)[0]
    code = re.sub(r"with torch\.cuda\._DeviceGuard\(\d+\):", "if True:", code)
    code = re.sub(r"torch\.cuda\.set_device\(\d+\)", "pass", code)
    for old, new in (
        ("empty_strided_cuda(", "empty_on_cpu("),
        ("get_raw_stream(0)", "0"),
        ("async_compile.triton(", "interpret("),
        ("async_compile.wait(globals())", ""),
    ):
        code = code.replace(old, new)

    def interpret(name, source, device_str=None):
        return InterpretedKernel(name, source, blocks)

    def empty_on_cpu(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    names = {"interpret": interpret, "empty_on_cpu": empty_on_cpu}
    return run_source(code, names)["call"]


def instructions(name, source, num_warps, **blocks):
    """Opcodes of a kernel compiled for sm_90, as the disassembler prints them."""
    meta = re.search(r"triton_meta=(\{.*?\}), *\n", source, re.S)[1]
    signature = ast.literal_eval(re.search(r"'signature': (\{.*?\})", meta)[1])
    aligned = re.findall(r"\((\d+),\): \[\['tt.divisibility', 16\]\]", meta)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"kernel{next(_names)}.py")
        file.write_text(bare(source))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, name)
        sizes = {n: blocks[n] for n in function.arg_names if n.endswith("BLOCK")}
        hints = {(int(i),): [["tt.divisibility", 16]] for i in aligned}
        compiled = triton.compile(
            triton.compiler.ASTSource(function, signature, sizes, hints),
            target=TARGET,
            options={"num_warps": num_warps},
        )
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        listing = subprocess.run(
            [tools / "nvdisasm", "-c", binary], capture_output=True, text=True
        ).stdout
    found = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)", listing, re.M
    )
    return [opcode for opcode in found if opcode != "NOP"]
