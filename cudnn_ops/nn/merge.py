"""Merging the projections of an attention that calls each of them by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cudnn_ops.nn.hooks import is_plain_linear
from cudnn_ops.nn.linear import MergedLinear, size_mismatch
from cudnn_ops.ops.linear import linear

#: The names of projections that models in transformers call with one input.
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class _Held:
    """The outputs of all projections of one input, until each has been asked for."""

    def __init__(self, x: Tensor, parts: Mapping[str, Tensor]) -> None:
        self.x, self.version, self.parts = x, _version(x), dict(parts)

    def is_of(self, x: Tensor) -> bool:
        return self.x is x and self.version == _version(x)


def _version(x: Tensor) -> int:
    """By which a change in place shows; what inference mode makes counts none."""
    return 0 if x.is_inference() else x._version


class _Product(MergedLinear):
    """The projections of one input. What they save and load, they do by themselves."""

    held: _Held | None = None
    is_apart = False
    """Whether the projections were seen to have different inputs, as with another sequence's keys:
    then each is computed by itself."""

    def part(self, name: str, x: Tensor) -> Tensor:
        """The output of one projection."""
        if self.held is not None and not self.held.is_of(x):
            self.held, self.is_apart = None, True
        if self.is_apart:
            bias = None if self.bias is None else self.parts(self.bias)[name]
            return linear(x, self.parts(self.weight)[name], bias)
        if self.held is None or name not in self.held.parts:
            self.held = _Held(x, dict(zip(self.outputs, self(x), strict=True)))
        part = self.held.parts.pop(name)
        if not self.held.parts:
            self.held = None
        return part

    def _save_to_state_dict(self, *_: Any) -> None:
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class SharedProjection(nn.Module):
    """A linear layer that is computed together with others of the same input.

    Whichever is called first computes all; each gives its own part. The first of the layers owns
    the merged parameters, and each saves and loads its own rows of them under its own keys.
    """

    def __init__(self, product: _Product, name: str, owns: bool) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = product.in_features, product.outputs[name]
        if owns:
            self.merged = product
        self._product = [product]  # of the others no submodule

    def _own(self, parameter: str) -> Tensor | None:
        product = self._product[0]
        merged = getattr(product, parameter)
        return None if merged is None else product.parts(merged)[self.name]

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: rows of the merged weight."""
        weight = self._own("weight")
        assert weight is not None
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[out_features], or None."""
        return self._own("bias")

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._product[0].part(self.name, x)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name in ("weight", "bias"):
            own = self._own(name)
            if own is not None:
                destination[prefix + name] = own if keep_vars else own.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = [name for name in ("weight", "bias") if self._own(name) is not None]
        for name in known:
            key, own = prefix + name, self._own(name)
            assert own is not None
            given = state_dict.get(key)
            if given is None:
                missing_keys.append(key)
            elif given.shape != own.shape:
                error_msgs.append(size_mismatch(key, given, own))
            else:
                self._make_real(name, given.device)
                with torch.no_grad():
                    own = self._own(name)
                    assert own is not None
                    own.copy_(given)
        for key in state_dict if strict else ():
            if key.startswith(prefix) and key.removeprefix(prefix) not in known:
                unexpected_keys.append(key)

    def _make_real(self, name: str, device: torch.device) -> None:
        """Gives a merged parameter memory, if it has none."""
        product = self._product[0]
        merged = getattr(product, name)
        if merged.is_meta:
            real = torch.empty_like(merged, device=device)
            setattr(product, name, nn.Parameter(real, merged.requires_grad))

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def shared_projections(module: nn.Module) -> dict[str, SharedProjection] | None:
    """What merges the attention projections of a module, by their names; None if it has none."""
    layers = {name: getattr(module, name, None) for name in ATTENTION_PROJECTIONS}
    plain = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear) and is_plain_linear(layer)
    }
    if len(plain) < len(layers) or len({id(layer) for layer in plain.values()}) < len(plain):
        return None
    try:
        product = _Product.of(plain)
    except ValueError:
        return None  # layers of different inputs or dtypes
    return {name: SharedProjection(product, name, owns=name == "q_proj") for name in plain}
