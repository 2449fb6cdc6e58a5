"""The vLLM plugin: `vllm serve OUT` reads an augmented checkpoint's experts sparsely. How to use it: docs/serving.md.

config      what vLLM asks about a checkpoint whose `quantization_config` says `mreader`, and the budget
checkpoint  which tensors a checkpoint promises, and their way past vLLM's own loaders
shards      a rank's part of a layer: its experts, its channels
experts     the routed experts of one layer: their tensors, and what computes a call
phases      which tokens of a step are decoded
"""


def register() -> None:
    """Register augmented checkpoints with vLLM: the entry point of `vllm.general_plugins`. May be called again."""
    import mreader.vllm.config  # noqa: F401
