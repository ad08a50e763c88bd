"""Diffusion models by either kind of names (see names): a model's tensors get the base's names, as
pieces of what the model stores.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from darelib.core.formats import STORED_BITS
from darelib.core.text import DareError, count_of
from darelib.models.checkpoint import Checkpoint
from darelib.models.names import (
    ALONE,
    DEEP,
    DEEP_PLACE,
    DIFFUSERS,
    MAPS,
    ORIGINAL,
    POINTS,
    PREFIXES,
    SD_FILE,
    TRANSPOSED,
    Map,
    Share,
)
from darelib.models.source import Source
from darelib.models.tensor import Known, Span, Tensor, drop_ones

Tensors: TypeAlias = Mapping[str, Tensor]
Array = Any
Named: TypeAlias = dict[str, Tensor]

INDEX: Final = re.compile(r"\.\d+(?=\.)")
# Elements, ten times those of the largest projection: all of it is read for each chunk of it.
MAX_TRANSPOSED: Final = 1 << 24
LONGEST: Final = 80  # letters of a module in any table: names of files may have many thousands


@dataclass(frozen=True)
class Home:
    """A component of a model: what its names begin with, and which they are."""

    prefix: str
    map: Map
    kind: int

    def list_names(self, tensors: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Its tensors: what the model calls them, and their names here."""
        for name in tensors:
            if name.startswith(self.prefix):
                yield name, f"{self.map.component}/{name[len(self.prefix) :]}"


def find_homes(tensors: Tensors) -> list[Home]:
    """The components of a diffusion model; if its names have no prefix, all that it may be.

    None: it is no known diffusion model.
    """
    homes: dict[str, Home] = {}
    known = [(prefix, own) for own, prefixes in PREFIXES for prefix in prefixes]
    bare = [("", component) for component, _ in PREFIXES]
    for pairs in (known, bare):
        for prefix, component in pairs:
            # A component with one kind of names is only recognised by its prefix.
            maps = [own for own in MAPS if own.component == component and (prefix or own.table)]
            for own in maps:
                kinds = [k for k, name in enumerate(own.markers) if f"{prefix}{name}" in tensors]
                if kinds:
                    kind = min(kinds[0], DIFFUSERS)
                    homes.setdefault(component, Home(prefix, own, kind))
        if homes:
            break
    return list(homes.values())


def is_bare(homes: Collection[Home]) -> bool:
    """Whether a model is one of several components, and its names do not say which."""
    return len(homes) > 1 and not any(home.prefix for home in homes)


def tell_apart(components: Collection[str], source: Source) -> str:
    """Which of these components a model is, by the name of its file, or of its folder."""
    path = source.path.absolute()
    known = [name for name in (path.stem, path.parent.name) if name in components]
    if not known:
        raise DareError(
            f"{source.name!r} may be any of {', '.join(components)}",
            "name its file or its folder like the component",
        )
    return known[0]


def list_ways(tensors: Tensors, homes: Iterable[Home]) -> dict[str, Tensor]:
    """What tensors can be called, by the names of both kinds, each with what it is made of."""
    ways: dict[str, Tensor] = {}
    for home in homes:
        own, both = _translate(home, tensors)
        others = {new: old for old, new in home.map.others.items()}
        renamed = {_rename(name, others): info for name, info in both[DIFFUSERS].items()}
        for names in (renamed, *both, own):
            ways |= {f"{home.map.component}/{name}": info for name, info in names.items()}
    return ways


def name_originally(tensors: Tensors, source: Source) -> dict[str, Tensor]:
    """The components of a model by the names that they have in a single file."""
    homes = {home.map.component: home for home in find_homes(tensors)}
    if is_bare(homes.values()):
        own = tell_apart(homes, source)
        homes = {own: homes[own]}
    places = next((home.map.file for home in homes.values() if home.map.file), SD_FILE)
    if len(homes) == 1 and homes.keys() <= ALONE.keys():
        places = ALONE
    named: dict[str, Tensor] = {}
    for component in homes.keys() & places.keys():
        _, both = _translate(homes[component], tensors)
        is_deep = places is SD_FILE and component == "text_encoder" and DEEP in both[DIFFUSERS]
        prefix, kind = DEEP_PLACE if is_deep else places[component]
        named |= {prefix + name: info for name, info in both[kind].items()}
    return dict(sorted(named.items()))


def _translate(home: Home, tensors: Tensors) -> tuple[Named, tuple[Named, Named]]:
    """The tensors of a component, by its own names, and by those of either kind."""
    own = {name[len(home.prefix) :]: tensors[name] for name, _ in home.list_names(tensors)}
    if home.kind == ORIGINAL:
        return own, (own, _turn(own, home.map.shares[ORIGINAL]))
    named = {_rename(name, home.map.others): info for name, info in own.items()}
    return own, (_turn(named, home.map.shares[DIFFUSERS]), named)


def _rename(name: str, names: Mapping[str, str]) -> str:
    entry, rest, _ = _find_entry(name, names)
    return names.get(entry, entry) + rest


def _find_entry(name: str, table: Mapping[str, Any]) -> tuple[str, str, str]:
    """The longest start of a name, up to a dot, that a table has, the rest, and the index of the
    block. Of a name that is not in the table, all of it.
    """
    match = INDEX.search(name)
    for form in (name, INDEX.sub(".#", name, count=1)):
        end = len(form) if len(form) <= LONGEST else form.rfind(".", 0, LONGEST + 1)
        while end > 0:
            if form[:end] in table:
                return form[:end], form[end:], match[0] if match else ""
            end = form.rfind(".", 0, end)
    return name, "", ""


def _turn(tensors: Tensors, table: Mapping[str, list[Share]]) -> Named:
    """The tensors of a component by the names of the other kind."""
    found = defaultdict[str, list[tuple[Share, Tensor]]](list)
    for name, info in tensors.items():
        if STORED_BITS[info.dtype] < 8:  # whose elements have no places of their own
            continue
        entry, rest, index = _find_entry(name, table)
        sides = len(info.shape)
        if entry in TRANSPOSED and sides == 2:
            if info.count > MAX_TRANSPOSED:
                continue
            info = transpose(info)
        elif entry in POINTS and sides in (2, 4):
            info = fit_shape(info, info.shape[:2] if sides == 4 else (*info.shape, 1, 1))
        for share in table.get(entry, [Share(name, 0, 0, 1, 1, 1)]):
            found[share.name.replace(".#", index) + rest].append((share, info))
    made = {name: _join_shares(parts) for name, parts in found.items()}
    return {name: info for name, info in made.items() if info}


def _join_shares(parts: list[tuple[Share, Tensor]]) -> Tensor | None:
    """A tensor of rows of others; None: not all of it is there, or it does not fit together."""
    parts.sort(key=lambda pair: pair[0].other_first)
    share, first = parts[0]
    if share.total == share.other_total == 1:
        return first
    is_whole = sum(share.length for share, _ in parts) == share.other_total
    alike = len({(info.dtype, info.shape[1:], info.merges) for _, info in parts}) == 1
    divides = all(info.shape and info.shape[0] % share.total == 0 for share, info in parts)
    if not (is_whole and alike and divides and first.merges):
        return None
    width = math.prod(first.shape[1:])
    pieces = []
    for share, info in parts:
        unit = info.shape[0] // share.total * width
        pieces.append(Span(info, share.first * unit, share.length * unit))
    rows = sum(share.length * info.shape[0] // share.total for share, info in parts)
    return join(pieces, (rows, *first.shape[1:]))


# --- back to the names of a base -----------------------------------------------------------------


def use_names(model: Checkpoint, base: Checkpoint) -> None:
    """Give the tensors of a diffusion model the base's names."""
    found = {} if model.partial else match_names(model.tensors, base.tensors, model.source)
    if not found:
        return
    used = count_used(found.values())
    # A tensor of which the base uses only a part stays, too, and is reported as ignored.
    own = {n: info for n, info in model.tensors.items() if used.get(id(info), -1) < info.count}
    model.warnings += (
        f"{model.name} has other names than the base: {len(used):,} of "
        f"{count_of(len(model.tensors), 'tensor')} matched by a map of names",
    )
    model.tensors = {**own, **found}


def match_names(tensors: Tensors, base: Tensors, source: Source) -> dict[str, Tensor]:
    """Tensors that a model has by other names than the base, by those of the base."""
    homes = find_homes(tensors)
    if not is_bare(homes):
        return _match(homes, tensors, base)
    found = {home.map.component: _match([home], tensors, base) for home in homes}
    named = {component: own for component, own in found.items() if own}
    fitting = {component: own for component, own in named.items() if fits_all(own, base)}
    choices = fitting or named
    if not choices:
        return {}
    is_clear = len({frozenset(own) for own in choices.values()}) == 1
    return choices[next(iter(choices)) if is_clear else tell_apart(choices, source)]


def fits_all(named: Tensors, base: Tensors) -> bool:
    return all(info.shape == base[name].shape for name, info in named.items())


def _match(homes: Iterable[Home], tensors: Tensors, base: Tensors) -> Named:
    ways = list_ways(tensors, homes)
    pairs = (pair for home in find_homes(base) for pair in home.list_names(base)) if ways else ()
    return {
        name: fit_shape(ways[way], base[name].shape)
        for name, way in pairs
        if way in ways and name not in tensors
    }


def put_back(changes: Tensors, base: Tensors, ways: Tensors, adapter: str) -> dict[str, Tensor]:
    """Changes of an adapter, by the names of the base. ways: tensors made of the base's, by other
    names.
    """
    made = {name: change for name, change in changes.items() if name in base}
    own = {id(info): name for name, info in base.items()}
    found = defaultdict[str, list[tuple[int, Span]]](list)
    for name, change in changes.items():
        if name in base:
            continue
        way = ways[name]
        if drop_ones(change.shape) != drop_ones(way.shape):
            raise DareError(
                f"{name!r} is {list(way.shape)} in the base, and {list(change.shape)} in the "
                f"adapter {adapter!r}",
                "give the model that it was trained on",
            )
        change = way.revert(change)
        place = 0
        for piece in way.list_spans():
            target = own[id(piece.tensor)]
            found[target].append((piece.start, Span(change, place, piece.count)))
            place += piece.count
    for name, pieces in found.items():
        filled = fill_gaps(pieces, base[name].count)
        if filled is None or name in made:
            raise DareError(
                f"the adapter {adapter!r} changes {name!r} twice, by different names",
                "save it by one kind of names",
            )
        made[name] = join(filled, base[name].shape)
        kinds = {(piece.tensor.dtype, piece.tensor.is_delta) for piece in filled if piece.tensor}
        if len(kinds) > 1 or (len(filled) > len(pieces) and not made[name].is_delta):
            raise DareError(
                f"the adapter {adapter!r} replaces some of {name!r}, and not all of it",
                "give a base with the names of the model that it was trained on",
            )
    return made


# --- tensors made of pieces of others -----------------------------------------------------------
# Rows lie one after the other, so that a range of them is a range of elements.


@dataclass(frozen=True, eq=False)
class Pieces(Tensor):
    """Pieces of other tensors of the same type, one after the other."""

    parts: tuple[Span, ...]

    @property
    def is_delta(self) -> bool:
        return any(part.tensor.is_delta for part in self.parts if part.tensor)

    def list_spans(self) -> tuple[Span, ...]:
        return self.parts

    @property
    def stored_bytes(self) -> int:
        parts = [(part.tensor, part.count) for part in self.parts if part.tensor]
        return sum(own.stored_bytes * count // own.count for own, count in parts if own.count)

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        real = np.float64 if self.dtype == "F64" else np.float32
        parts = [
            span.tensor.read(span.start, span.count) if span.tensor else np.zeros(span.count, real)
            for span in self._cut(start, count)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_raw(self, start: int, size: int) -> Array:
        item = STORED_BITS[self.dtype] // 8
        parts = [
            span.tensor.read_raw(span.start * item, span.count * item)
            if span.tensor
            else np.zeros(span.count * item, np.uint8)
            for span in self._cut(start // item, size // item)
        ]
        return np.concatenate(parts)

    def _cut(self, start: int, count: int) -> Iterator[Span]:
        """What elements of it are made of."""
        place = 0  # of the part
        for part in self.parts:
            first = max(start, place)
            last = min(start + count, place + part.count)
            if first < last:
                yield Span(part.tensor, part.start + first - place, last - first)
            place += part.count


class Transposed(Pieces):
    """A whole matrix of which rows are stored as columns."""

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        stored = super().read(0, self.count).reshape(self.shape[::-1])
        return stored.T.reshape(-1)[start : start + count]

    def read_raw(self, start: int, size: int) -> Array:
        stored = super().read_raw(0, self.nbytes).reshape(*self.shape[::-1], -1)
        return stored.swapaxes(0, 1).reshape(-1)[start : start + size]

    def revert(self, change: Tensor) -> Tensor:
        return transpose(change)


def count_used(infos: Iterable[Tensor]) -> Counter[int]:
    """By id of a model's tensors: how many of their elements others are made of."""
    used = Counter[int]()
    for info in infos:
        for piece in info.list_spans():
            used[id(piece.tensor)] += piece.count
    return used


def transpose(info: Tensor) -> Tensor:
    return Transposed(info.dtype, info.shape[::-1], (Span(info, 0, info.count),))


def join(parts: Sequence[Span], shape: tuple[int, ...]) -> Tensor:
    """A tensor of pieces; of one that is whole, that one, if it has this shape."""
    first = next(part.tensor for part in parts if part.tensor)
    if len(parts) == 1 and parts[0].count == first.count:
        if first.shape == shape:
            return first
        if first.added_rank:  # a product stays one
            return replace(first, shape=shape)
    return Pieces(first.dtype, shape, tuple(parts))


def fit_shape(info: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A convolution of a single point is a matrix, and may be stored as either."""
    sides, wanted = ([side for side in each if side > 1] for each in (info.shape, shape))
    fits = sides == wanted and info.shape != shape and STORED_BITS[info.dtype] >= 8
    return join(info.list_spans(), shape) if fits else info


def fill_gaps(pieces: Sequence[tuple[int, Span]], count: int) -> list[Span] | None:
    """Pieces in the order of their places, with zeros between them; None: two of them overlap."""
    filled: list[Span] = []
    end = 0
    for place, piece in [*sorted(pieces, key=lambda pair: pair[0]), (count, Span(None, 0, 0))]:
        if place < end:
            return None
        filled += [Span(None, 0, place - end), piece]
        end = place + piece.count
    return [piece for piece in filled if piece.count]
