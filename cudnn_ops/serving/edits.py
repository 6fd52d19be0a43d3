"""What the requests of a step change in their logits: biases, penalties, excluded tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cudnn_ops.serving.request import Branch, Request
from cudnn_ops.serving.sampling import Allowed, check_vocabulary


def upload(parts: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies tensors [n] of the host to the device, by one copy for all of a dtype."""
    uploaded = dict(parts)
    for dtype in {part.dtype for part in parts.values()}:
        names = [name for name, part in parts.items() if part.dtype == dtype]
        joined = torch.cat([parts[name] for name in names])
        if device.type == "cuda":
            # Copied from other memory, the host would wait for all that is queued.
            joined = joined.pin_memory().to(device, non_blocking=True)
        uploaded |= zip(names, joined.split([len(parts[name]) for name in names]), strict=True)
    return uploaded


class Edits:
    """Lists of who biases and excludes which tokens: made on the host, applied on the device.

    Places are ``row * vocabulary + token``.

    Args:
        vocabulary: the number of tokens.
        device: where the logits are.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._biased, self._biases = array("q"), array("d")
        self._constrained = array("q")  # rows of which ids are allowed
        self._ids: list[Tensor] = []  # places
        self._masked: dict[torch.device, list[int]] = {}  # rows of which a mask is there
        self._masks: dict[torch.device, list[Tensor]] = {}
        self._excluded = array("q")

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._biased or self._constrained or self._masks or self._excluded)

    def add(self, row: int, branch: Branch) -> None:
        """Adds those of one row.

        Raises:
            Exception: whatever its ``allowed_tokens`` raises.
            ValueError: what it returned is not what it may; a bias of a token that is not there.
        """
        params, vocabulary = branch.request.params, self._vocabulary
        start = row * vocabulary
        if params.logit_bias:
            check_vocabulary("logit_bias", params.logit_bias, vocabulary)
            self._biased.extend([start + token for token in params.logit_bias])
            self._biases.extend(params.logit_bias.values())
        excluded: list[int] = []
        if branch.output_tokens < params.min_tokens:
            excluded.extend(params.stop_tokens)
        for *before, last in params.bad_words:
            if not before or branch.last(len(before)) == before:
                excluded.append(last)
        # Stop tokens and bad words may be those of a larger vocabulary.
        self._excluded.extend([start + token for token in excluded if 0 <= token < vocabulary])
        if params.allowed_tokens is not None:
            self._allow(row, params.allowed_tokens(branch.output))

    def parts(self) -> dict[str, Tensor]:
        """The lists that must be on the device, those with anything in them."""
        lists: dict[str, array[int] | array[float]] = {
            "biased": self._biased,
            "biases": self._biases,
            "constrained": self._constrained,
            "excluded": self._excluded,
        }
        parts = {name: _as_tensor(numbers) for name, numbers in lists.items() if numbers}
        if self._constrained:
            parts["ids"] = torch.cat(self._ids)
        for device, rows in self._masked.items():
            parts[f"masked on {device}"] = torch.tensor(rows)
        return parts

    def add_biases_(self, scores: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Adds the biases to scores [rows, vocabulary]; ``parts`` are on the device now."""
        if self._biased:
            scores.view(-1).index_add_(0, parts["biased"], parts["biases"].to(scores.dtype))

    def exclude_(self, scores: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Makes the scores of excluded tokens minus infinity."""
        if not (self._constrained or self._masks or self._excluded):
            return
        is_excluded = torch.zeros_like(scores, dtype=torch.bool)
        places = is_excluded.view(-1)
        if self._constrained:
            is_excluded.index_fill_(0, parts["constrained"], True)
            places.index_fill_(0, parts["ids"], False)
        for device, masks in self._masks.items():
            mask = torch.stack(masks)
            if mask.device != scores.device:
                mask = mask.pin_memory().to(scores.device, non_blocking=True)
            is_excluded.index_copy_(0, parts[f"masked on {device}"], ~mask)
        if self._excluded:
            places.index_fill_(0, parts["excluded"], True)
        scores.masked_fill_(is_excluded, -torch.inf)

    def _allow(self, row: int, allowed: Allowed) -> None:
        if allowed is None:
            return
        if not isinstance(allowed, Tensor) and hasattr(allowed, "__array__"):
            allowed = torch.as_tensor(allowed)  # NumPy's
        if isinstance(allowed, Tensor) and allowed.dtype == torch.bool:
            on_cpu = allowed.device.type == "cpu"
            if allowed.shape != (self._vocabulary,) or not (
                on_cpu or allowed.device == self._device
            ):
                raise ValueError(
                    f"allowed_tokens must return masks of shape [{self._vocabulary}], the model's "
                    f"vocabulary, on the CPU or {self._device}, got {list(allowed.shape)} on "
                    f"{allowed.device}"
                )
            self._masked.setdefault(allowed.device, []).append(row)
            self._masks.setdefault(allowed.device, []).append(allowed)
            return
        ids = _token_ids(allowed)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
            raise ValueError(
                f"allowed_tokens must return token ids from 0 to {self._vocabulary - 1}, the "
                f"model's vocabulary, got {int(ids.min())} to {int(ids.max())}"
            )
        self._constrained.append(row)
        self._ids.append(ids + row * self._vocabulary)


class TokenCounts:
    """How often tokens occurred in requests with penalties, kept on the device between steps.

    A step tells only the tokens that are new. The memory is 5 bytes for each row and token.

    Args:
        rows: the largest number of requests at once.
        vocabulary: the number of tokens.
        device: where they are.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self._in_output = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)
        self._free = list(range(rows))
        self._rows: dict[Request, int] = {}
        self._told: dict[Request, int] = {}  # tokens of each that are counted

    def parts(self, branches: Mapping[int, Branch], batch: int) -> dict[str, Tensor]:
        """What must be on the device for :meth:`penalize`.

        Args:
            branches: those with penalties, by their row of the batch.
            batch: rows.
        """
        for request in [request for request in self._rows if request.is_finished]:
            self._forget(request)
        needed = {branch.request for branch in branches.values()}
        rows, cleared = array("q", [0]) * batch, array("q")
        prompt, output, drafted = array("q"), array("q"), array("q")
        vocabulary = self._in_prompt.shape[1]
        for index, branch in branches.items():
            request = branch.request
            drafted.extend([index * vocabulary + t for t in branch.drafts if t < vocabulary])
            if request not in self._rows:
                if not self._free:  # of one that was preempted, say
                    self._forget(next(known for known in self._rows if known not in needed))
                self._rows[request], self._told[request] = self._free.pop(), 0
                cleared.append(self._rows[request])
            rows[index] = self._rows[request]
            start, told = rows[index] * vocabulary, self._told[request]
            split = request.stats.prompt_tokens
            # Prompts may have tokens that the model never generates, which stand for images.
            for places, first, stop in ((prompt, told, split), (output, max(told, split), None)):
                new = request.tokens[first:stop]
                places.extend([start + token for token in new if token < vocabulary])
            self._told[request] = len(request.tokens)
        lists = {"counted": rows, "cleared": cleared, "prompt": prompt, "output": output}
        lists["drafted"] = drafted
        return {name: _as_tensor(numbers) for name, numbers in lists.items() if numbers}

    def penalize(self, scores: Tensor, options: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """The scores with penalties; those of rows without any stay as they are.

        Args:
            scores: [batch, vocabulary].
            options: [batch, 3]: the penalties of repetition, presence and frequency.
            parts: what :meth:`parts` returned, on the device.
        """
        if "cleared" in parts:
            self._in_prompt.index_fill_(0, parts["cleared"], False)
            self._in_output.index_fill_(0, parts["cleared"], 0)
        if "prompt" in parts:
            self._in_prompt.view(-1).index_fill_(0, parts["prompt"], True)
        if "output" in parts:
            ones = torch.ones_like(parts["output"], dtype=torch.int32)
            self._in_output.view(-1).index_add_(0, parts["output"], ones)
        repetition, presence, frequency = options.to(scores.dtype)[:, :, None].unbind(1)
        count = self._in_output.index_select(0, parts["counted"])
        if "drafted" in parts:  # of these rows alone, for they may be rejected
            ones = torch.ones_like(parts["drafted"], dtype=torch.int32)
            count.view(-1).index_add_(0, parts["drafted"], ones)
        is_there = count > 0
        occurred = is_there | self._in_prompt.index_select(0, parts["counted"])
        repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
        return torch.where(occurred, repeated, scores) - (frequency * count + presence * is_there)

    def _forget(self, request: Request) -> None:
        self._free.append(self._rows.pop(request))
        del self._told[request]


def _as_tensor(numbers: array[int] | array[float]) -> Tensor:
    """A view of an array that has any."""
    dtype = torch.float64 if numbers.typecode == "d" else torch.int64
    return torch.frombuffer(numbers, dtype=dtype)


def _token_ids(allowed: Tensor | Sequence[int] | object) -> Tensor:
    """int64 [n] on the CPU."""
    if isinstance(allowed, Tensor):
        if allowed.dim() == 1 and allowed.device.type == "cpu" and not allowed.is_floating_point():
            return allowed.long()
    else:
        try:
            ids = list(allowed)  # type: ignore[call-overload]
            if not any(isinstance(token, bool) for token in ids):
                return _as_tensor(array("q", ids)) if ids else torch.empty(0, dtype=torch.int64)
        except (TypeError, OverflowError):
            pass
    got = repr(allowed)
    if isinstance(allowed, Tensor):
        got = f"{allowed.dtype} {list(allowed.shape)} on {allowed.device}"
    raise ValueError(
        "allowed_tokens must return token ids (a collection, or a tensor [n] on the CPU), a bool "
        f"tensor [vocabulary], or None, got {got}"
    )
