"""model_stock: the mean, times a share that grows as the angles between the deltas shrink."""

import math
from functools import lru_cache
from itertools import combinations
from typing import Final

from darelib.methods.arcs import LEAST_PRODUCT, Basis, Products, clip, weigh_by_products
from darelib.methods.looks import GramLook
from darelib.methods.method import SUM, Family, Method


@lru_cache(64)
def find_stock(products: Products, count: int) -> Products:
    lengths = Basis(products, count).lengths
    sizes = [one * other for one, other in combinations(lengths, 2)]
    pairs = zip(products[count:], sizes, strict=True)
    cosines = [clip(product / max(size, LEAST_PRODUCT)) for product, size in pairs]
    mean = math.fsum(cosines) / len(cosines)
    divisor = 1 + (count - 1) * mean
    share = 0.0 if abs(divisor) < LEAST_PRODUCT else mean / divisor
    return (share,) * count


STOCK: Final = Method(
    "model_stock",
    card=lambda _: (
        "averaged, scaled, tensor by tensor, by how far their directions agree, and added to the "
        "base"
    ),
    paper="[Model Stock](https://arxiv.org/abs/2403.19522)",
    operation=SUM,
    looks=lambda _: (GramLook,),
    weigh=weigh_by_products(lambda own, found: find_stock(found, len(own.weights))),
    models=(2, None),
    mergekit={
        "model_stock": Family(
            only={"filter_wise": (False, "a tensor is one vector, not one by row")},
            defaults={"filter_wise": False},
            others=(2, None),
        ),
    },
)
