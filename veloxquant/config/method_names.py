"""Names of the methods, apart from their settings: cheap to import to check a name."""

from typing import Literal, get_args

MethodName = Literal[
    "turboquant_prod", "turboquant_mse", "turboquant_rvq", "polar", "qjl", "vecinfer", "spectral",
    "kivi", "kivi_sink", "svdq", "kitty", "adakv", "xquant", "kvquant", "palu", "cachegen",
    "minicache", "gear", "zipcache", "snapkv", "streaming_llm", "h2o", "tova", "pyramidkv",
    "squeeze", "chunkkv", "cam", "xkv", "nsnquant", "knorm", "skvq", "qfilters", "keyformer",
    "morphkv", "kvzip", "kvtc", "curdkv", "nestedkv", "amc", "a2ats", "anchorkv", "rocketkv",
    "age_tiered",
]  # fmt: skip
METHOD_NAMES: tuple[str, ...] = get_args(MethodName)
BASELINE = "fp16"
