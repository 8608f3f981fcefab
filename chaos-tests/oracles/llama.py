"""A Llama decoder in plain PyTorch, written apart from the engine's: the judge
of what a checkpoint means. Parameters come as a dict under torchtitan's names.
"""

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def load(checkpoint, scratch):
    """The nested state dict of a DCP directory, read by PyTorch itself."""
    dcp_to_torch_save(checkpoint, scratch)
    return torch.load(scratch, map_location="cpu", weights_only=False)


def parameters(state):
    """The model's part of a torchtitan state dict, which is flat at top level."""
    apart = {"optimizer", "lr_scheduler", "train_state", "dataloader"}
    return {name: value for name, value in state.items() if name not in apart}


def rotations(shape, time, dtype):
    """Complex rotary factors, [time, head_dim / 2]."""
    head_dim = shape["dim"] // shape["n_heads"]
    exponents = torch.arange(0, head_dim, 2).to(dtype) / head_dim
    frequencies = 1.0 / shape["rope_theta"] ** exponents
    if scaling := shape["rope_scaling"]:
        wavelength = 2 * torch.pi / frequencies
        context = scaling["original_context"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
        frequencies = smooth * frequencies + (1 - smooth) * frequencies / scaling["factor"]
    angles = torch.outer(torch.arange(time).to(dtype), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, factors):
    """Interleaved pairs of [batch, time, heads, head_dim]."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors[None, :, None, :]).flatten(3)


def forward(shape, weights, ids):
    """Logits [batch, time, vocab_size] of ids [batch, time]."""
    dim, heads, kv_heads = shape["dim"], shape["n_heads"], shape["n_kv_heads"]
    batch, time = ids.shape
    x = F.embedding(ids, weights["tok_embeddings.weight"])
    factors = rotations(shape, time, x.dtype)

    def norm(x, name):
        return F.rms_norm(x, (dim,), weights[f"{name}.weight"], shape["norm_eps"])

    for layer in range(shape["n_layers"]):
        def linear(x, name):
            return F.linear(x, weights[f"layers.{layer}.{name}.weight"])

        h = norm(x, f"layers.{layer}.attention_norm")
        q = rotate(linear(h, "attention.wq").view(batch, time, heads, -1), factors)
        k = rotate(linear(h, "attention.wk").view(batch, time, kv_heads, -1), factors)
        v = linear(h, "attention.wv").view(batch, time, kv_heads, -1)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(mixed.transpose(1, 2).reshape(batch, time, -1), "attention.wo")
        h = norm(x, f"layers.{layer}.ffn_norm")
        gated = F.silu(linear(h, "feed_forward.w1")) * linear(h, "feed_forward.w3")
        x = x + linear(gated, "feed_forward.w2")
    return F.linear(norm(x, "norm"), weights["output.weight"])
