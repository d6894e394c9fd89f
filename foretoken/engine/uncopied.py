"""What runs in one process and cannot be copied: its threads, locks and caches are those of the object itself."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from foretoken.errors import InputError


class Uncopied:
    """Base of classes whose objects neither `pickle` nor `copy` takes; `copy_remedy` says what to do instead."""

    copy_remedy: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        """Refuse `pickle.dumps`, `copy.copy` and `copy.deepcopy`, which all come here.

        Raises:
            InputError: always.
        """
        raise InputError(type(self).__name__, "pickled or copied", self.copy_remedy)
