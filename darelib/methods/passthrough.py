"""passthrough: the base as it is, or scaled; it takes no models."""

from typing import Final

from darelib.methods.looks import weigh
from darelib.methods.method import ONLY, SUM, Family, Method

PASSTHROUGH: Final = Method(
    "passthrough",
    card=lambda settings: (
        "copied" if settings.options["scale"] == 1 else f"times {settings.options['scale']:g}"
    ),
    operation=SUM,
    settings={"scale": 1.0},
    share=lambda *_: (),
    weigh=lambda own, models, found: weigh(own, models, found, base_share=own.options["scale"] - 1),
    models=(0, 0),
    keeps_base=lambda settings: settings.options["scale"] == 1,
    mergekit={
        "passthrough": Family(
            each={"scale": "scale"},
            defaults={"scale": 1.0},
            base=ONLY,
            others=(0, 0),
        ),
    },
)
