from torch_overlay._overrides import adds_config


adds_config(
    "torch._functorch.config:use_site_remat",
    default="light",
    value_type=str,
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
)

adds_config(
    "torch._functorch.config:rng_recompute",
    default="replay",
    value_type=str,
    feature="rng",
    patch="rng-under-budget",
    issue="pytorch/pytorch#190758",
)

adds_config(
    "torch._functorch.config:recomputable_custom_ops",
    default=[],
    value_type=list[str],
    feature="rng",
    patch="rng-under-budget",
    issue="pytorch/pytorch#190758",
)

adds_config(
    "torch._functorch.config:save_by_peak",
    default=True,
    value_type=bool,
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)

adds_config(
    "torch._functorch.config:activation_memory_peak_target",
    default=None,
    value_type=object,
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)
