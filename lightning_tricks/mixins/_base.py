"""The base class of the mixins, which checks that they come before the LightningModule in the bases."""

from typing import TYPE_CHECKING, Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl

if TYPE_CHECKING:
    _Base = pl.LightningModule
else:
    _Base = object


class Mixin(_Base):
    """Refuses a class with a LightningModule before a mixin in its bases, which would hide the mixin's method."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if pl.LightningModule not in order:
            return
        lightning = order.index(pl.LightningModule)
        late = [c.__name__ for c in order[lightning:] if issubclass(c, Mixin) and c is not Mixin]
        if late:
            raise UsageError(f"class {cls.__name__}: put {', '.join(late)} before the LightningModule in its bases")
