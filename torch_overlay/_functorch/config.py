from torch_overlay._overrides import adds_config


adds_config(
    "torch._functorch.config:use_site_remat",
    default="light",
    value_type=str,
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
)
