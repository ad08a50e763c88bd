"""Tensors of diffusion models by all names that they have (see names): those of another model are
found by them, and put back to the names of a base.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from darelib.core.formats import FORMATS
from darelib.core.text import DareError
from darelib.models.names import (
    DEEP,
    DEEP_PLACE,
    DIFFUSERS,
    MAPS,
    ORIGINAL,
    POINTS,
    PREFIXES,
    SD,
    SINGLE_FILES,
    TRANSPOSED,
    Map,
    Share,
)
from darelib.models.pieces import (
    Piece,
    Transposed,
    count_rows,
    cut_rows,
    fill_gaps,
    fit_shape,
    join,
    list_pieces,
    transpose,
)
from darelib.models.tensors import TensorInfo

Tensors: TypeAlias = Mapping[str, TensorInfo]

NUMBER: Final = re.compile(r"\.\d+(?=\.)")


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
    """The components that a model has; none: it is no diffusion model that is known."""
    homes: dict[str, Home] = {}
    known = [(prefix, own) for own, prefixes in PREFIXES for prefix in prefixes]
    bare = [("", component) for component, _ in PREFIXES]
    for pairs in (known, bare):
        for prefix, component in pairs:
            # What has but one kind of names is only known among others.
            maps = [own for own in MAPS if own.component == component and (prefix or own.table)]
            for own in maps:
                kinds = [k for k, name in enumerate(own.markers) if f"{prefix}{name}" in tensors]
                if kinds:
                    kind = min(kinds[0], DIFFUSERS)
                    homes.setdefault(component, Home(prefix, own, kind))
        if homes:
            break
    return list(homes.values())


def list_ways(tensors: Tensors) -> dict[str, TensorInfo]:
    """What tensors can be called, by the names of both kinds, each with what it is made of."""
    ways: dict[str, TensorInfo] = {}
    for home in find_homes(tensors):
        own, both = _translate(home, tensors)
        others = {new: old for old, new in home.map.others.items()}
        renamed = {_rename(name, others): info for name, info in both[DIFFUSERS].items()}
        for names in (renamed, *both, own):
            ways |= {f"{home.map.component}/{name}": info for name, info in names.items()}
    return ways


def name_originally(tensors: Tensors) -> dict[str, TensorInfo]:
    """The components of a model by the names that they have in a single file."""
    homes = {home.map.component: home for home in find_homes(tensors)}
    places = next((p for p in SINGLE_FILES if homes.keys() <= p.keys()), SINGLE_FILES[-1])
    named: dict[str, TensorInfo] = {}
    for component in homes.keys() & places.keys():
        _, both = _translate(homes[component], tensors)
        is_deep = places is SD and component == "text_encoder" and DEEP in both[DIFFUSERS]
        prefix, kind = DEEP_PLACE if is_deep else places[component]
        named |= {prefix + name: info for name, info in both[kind].items()}
    return dict(sorted(named.items()))


def _translate(
    home: Home, tensors: Tensors
) -> tuple[dict[str, TensorInfo], tuple[dict[str, TensorInfo], dict[str, TensorInfo]]]:
    """The tensors of a component, by its own names, and by those of either kind."""
    own = {
        name.removeprefix(home.prefix): info
        for name, info in tensors.items()
        if name.startswith(home.prefix)
    }
    if home.kind == ORIGINAL:
        return own, (own, dict(_split(own, home.map)))
    named = {_rename(name, home.map.others): info for name, info in own.items()}
    return own, (dict(_stack(named, home.map)), named)


def _rename(name: str, names: Mapping[str, str]) -> str:
    start = _find_start(name, names)
    return names[start] + name[len(start) :] if start else name


def _find_start(name: str, table: Iterable[str]) -> str:
    """The longest beginning of a name, up to a dot, that a table has; "": it has none."""
    end = len(name)
    while end > 0 and name[:end] not in table:
        end = name.rfind(".", 0, end)
    return name[: max(end, 0)]


def _find_entry(name: str, table: Iterable[str]) -> tuple[str, str, str]:
    """What a table lists a name by, what comes after that, and the number of the block."""
    match = NUMBER.search(name)
    hidden = NUMBER.sub(".#", name, count=1)
    for form in (name, hidden):
        if start := _find_start(form, table):
            return start, form[len(start) :], match[0] if match else ""
    return "", "", ""


def _split(tensors: Tensors, own: Map) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors of an original file by the names of diffusers."""
    for name, info in tensors.items():
        entry, rest, number = _find_entry(name, own.stacks)
        parts = own.stacks.get(entry, ((name, 0, 1),))
        shares = [(part.replace(".#", number) + rest, low, high) for part, low, high in parts]
        if len(shares) == 1:
            yield shares[0][0], _reshape(entry, info)
        else:
            yield from _cut_shares(info, shares)


def _stack(tensors: Tensors, own: Map) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors of diffusers by the names of original files."""
    for name, info in tensors.items():
        entry, rest, number = _find_entry(name, own.back)
        old = own.back.get(entry, name)
        parts = own.stacks.get(old, ())
        shares = [(part.replace(".#", number) + rest, low, high) for part, low, high in parts]
        stacked = _join_shares(tensors, shares) if shares and shares[0][0] == name else None
        if len(shares) < 2:
            yield old.replace(".#", number) + rest, _reshape(old, info)
        elif stacked:  # by its first part
            yield old.replace(".#", number) + rest, stacked


def _reshape(old: str, info: TensorInfo) -> TensorInfo:
    """A tensor of an original file as diffusers has it, or the other way round."""
    sides = len(info.shape)
    if old in TRANSPOSED and sides == 2:
        return transpose(info)
    if old in POINTS and sides in (2, 4):
        return fit_shape(info, info.shape[:2] if sides == 4 else (*info.shape, 1, 1))
    return info


def _cut_shares(info: TensorInfo, shares: list[Share]) -> Iterator[tuple[str, TensorInfo]]:
    """The parts of a stacked tensor; none: it does not consist of so many."""
    total = sum(last - first for _, first, last in shares)
    rows = count_rows(info)
    if rows % total or not info.encoding.merges:
        return
    pieces = defaultdict[str, dict[int, Piece]](dict)
    place = 0
    for name, first, last in shares:
        pieces[name][first] = cut_rows(info, place, (last - first) * rows // total)
        place += (last - first) * rows // total
    for name, found in pieces.items():
        ordered = [found[first] for first in sorted(found)]
        shared = sum(last - first for part, first, last in shares if part == name)
        yield name, join(ordered, (shared * rows // total, *info.shape[1:]))


def _join_shares(tensors: Tensors, shares: list[Share]) -> TensorInfo | None:
    """A stacked tensor; None: not all of it is there, or it does not fit together."""
    infos = [tensors[name] for name, _, _ in shares if name in tensors]
    dtypes = {info.dtype for info in infos}
    alike = len(dtypes) == 1 or dtypes <= FORMATS.keys()
    fits = alike and len({info.shape[1:] for info in infos}) == 1
    are_whole = all(info.shape and info.encoding.merges for info in infos)
    if len(infos) < len(shares) or not fits or not are_whole:
        return None
    pieces = []
    rows = 0
    for (name, first, last), info in zip(shares, infos, strict=True):
        total = max(end for other, _, end in shares if other == name)
        unit, rest = divmod(count_rows(info), total)
        if rest:
            return None
        pieces.append(cut_rows(info, first * unit, (last - first) * unit))
        rows += (last - first) * unit
    return join(pieces, (rows, *infos[0].shape[1:]))


# --- back to the names of a base -----------------------------------------------------------------


def match_names(tensors: Tensors, base: Tensors) -> dict[str, TensorInfo]:
    """Tensors that a model has by other names than the base, by those of the base."""
    ways = list_ways(tensors)
    homes = find_homes(base) if ways else []
    pairs = (pair for home in homes for pair in home.list_names(base))
    return {
        name: fit_shape(ways[way], base[name].shape)
        for name, way in pairs
        if way in ways and name not in tensors
    }


def put_back(changes: Tensors, base: Tensors, ways: Tensors, adapter: str) -> dict[str, TensorInfo]:
    """Changes of an adapter, by the names of the base. ways: other names, of what is made of the
    base's.
    """
    made = {name: change for name, change in changes.items() if name in base}
    own = {id(info): name for name, info in base.items()}
    found = defaultdict[str, list[tuple[int, Piece]]](list)
    for name in changes.keys() - made.keys():
        change = changes[name]
        way = ways[name]
        if change.count != way.count:
            raise DareError(
                f"{name!r} is {list(way.shape)} in the base, and {list(change.shape)} in the "
                f"adapter {adapter!r}",
                "give the model that it was trained on",
            )
        if isinstance(way.encoding, Transposed):
            way = way.encoding.stored
            change = transpose(change)
        place = 0
        for piece in list_pieces(way):
            target = own[id(piece.info)]
            found[target].append((piece.start, Piece(change, place, piece.count)))
            place += piece.count
    for name, pieces in found.items():
        filled = fill_gaps(pieces, base[name].count)
        if filled is None or name in made:
            raise DareError(
                f"the adapter {adapter!r} changes {name!r} twice, by different names",
                "save it by one kind of names",
            )
        made[name] = _join_changes(name, base[name].shape, filled, adapter)
    return made


def _join_changes(
    name: str, shape: tuple[int, ...], pieces: list[Piece], adapter: str
) -> TensorInfo:
    kinds = {piece.info is None or piece.info.is_delta for piece in pieces}
    if len(kinds) > 1:
        raise DareError(
            f"the adapter {adapter!r} replaces some of {name!r}, and not all of it",
            "give a base that has the names that it was trained by",
        )
    return join(pieces, shape)
