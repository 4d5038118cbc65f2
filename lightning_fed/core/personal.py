"""Parameters and buffers that stay with the client, chosen by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor, nn

from lightning_fed.core.layout import buffers_of, parameters_of
from lightning_fed.core.patterns import is_chosen, is_match
from lightning_fed.core.records import num_bytes


@dataclass(frozen=True)
class Personal:
    """Names of parameters and buffers that every client keeps to itself; none by default.

    >>> personal = Personal(("head.*", "!head.scale"))
    >>> [name for name in ("body.weight", "head.weight", "head.scale") if name in personal]
    ['head.weight']
    """

    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: str | Sequence[str] | None) -> Personal:
        """Personal parts by a pattern or a list of patterns."""
        if given is None:
            return cls()
        patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else ()
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ValueError(
                'FederatedServer.personal must be a pattern of names such as "head.*", a list of them, or None;'
                f" got {given!r}."
            )
        return cls(patterns)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.patterns) and is_chosen(name, self.patterns)

    def part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The personal ones of named tensors."""
        return {name: t for name, t in tensors.items() if name in self} if self else {}

    def rest(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of named tensors that are not personal."""
        return {name: t for name, t in tensors.items() if name not in self}

    def part_of(self, module: nn.Module) -> dict[str, Tensor]:
        """The personal parameters, frozen ones included, and buffers of a module; no copies."""
        return self.part({**parameters_of(module), **buffers_of(module)})

    def check(self, module: nn.Module) -> None:
        """Refuse patterns without a match, halves of shared tensors, and a model of which nothing is left to share."""
        if not self:
            return
        aliases = _aliases(module)
        self._check_matches([name for names in aliases for name in names])
        for names in aliases:
            inside = [name for name in names if name in self]
            if inside and len(inside) < len(names):
                outside = next(name for name in names if name not in self)
                raise ValueError(
                    f"FederatedServer.personal={list(self.patterns)} matches {inside[0]}, but not {outside}, which is"
                    " the same tensor. Match both names, or neither."
                )
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        if trained and all(name in self for name in trained):
            raise ValueError(
                f"FederatedServer.personal={list(self.patterns)} matches every trainable parameter of"
                f" {type(module).__name__}, so there is nothing to federate. Leave some of them to the server, or train"
                " every client alone."
            )

    def _check_matches(self, names: Sequence[str]) -> None:
        for pattern in self.patterns:
            bare = pattern.removeprefix("!")
            if not any(is_match(name, bare) for name in names):
                near = get_close_matches(bare, names, n=5, cutoff=0.0)
                raise ValueError(
                    f"FederatedServer.personal: {pattern!r} matches no parameter or buffer of the module. The nearest"
                    f" names are {', '.join(near) or 'none'}; patterns match whole names, such as"
                    f" {(near[0].partition('.')[0] + '.*') if near else 'head.*'!r}."
                )
        if not any(name in self for name in names):
            raise ValueError(f"FederatedServer.personal={list(self.patterns)} leaves no parameter or buffer personal.")

    def described(self, module: nn.Module, first: Mapping[str, Tensor], sent: int) -> str:
        """What is personal, in a sentence; ``sent`` is the number of bytes of a vector that is sent.

        Frozen parameters that match would not be sent either: they are no saving.
        """
        parameters = dict(module.named_parameters())
        own = [t for name, t in first.items() if name in parameters]
        saved = num_bytes([t for name, t in first.items() if name in parameters and parameters[name].requires_grad])
        frozen = sum(name in parameters and not parameters[name].requires_grad for name in first)
        names = ", ".join([*first][:6]) + (", ..." if len(first) > 6 else "")
        return (
            f"Personal parameters: {len(own)} ({sum(t.numel() for t in own):,} numbers"
            f"{f'; {frozen} are frozen' if frozen else ''}), personal buffers: {len(first) - len(own)}. They stay with"
            f" the clients, which saves {saved:,} of {saved + sent:,} bytes of each model that is sent: {names}."
        )


def _aliases(module: nn.Module) -> list[list[str]]:
    """The names of every parameter and buffer; several for a shared one."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    found: dict[int, list[str]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), []).append(name)
    return list(found.values())
