"""Prepared objects that stand for the user's: attributes that are not their own are those of the object inside."""

from typing import Any, ClassVar

from shardkit.errors import UsageError


class Forwarding:
    """Forwards attributes that are read, set or deleted to the object inside: `optimizer.rho = 0.1`.

    Its own attributes are those of the class, and those that `__init__` sets before the object inside, which it sets
    last. `isinstance` finds it of the class inside, too: `if isinstance(scheduler, ReduceLROnPlateau)`.
    """

    _inside: ClassVar[str]
    """The name of the attribute that is the object inside."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(vars(self).get(self._inside, self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        inside = type(vars(self)[self._inside]).__name__
        raise UsageError(
            f"pickle: a prepared {inside} cannot be pickled or copied (it holds the prepared models); save its "
            "state_dict(), or all by accelerator.save_state()."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == self._inside:
            raise AttributeError(name)
        return getattr(getattr(self, self._inside), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(getattr(self, self._inside), name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
        else:
            delattr(getattr(self, self._inside), name)

    def _is_own(self, name: str) -> bool:
        return name in vars(self) or hasattr(type(self), name) or self._inside not in vars(self)
