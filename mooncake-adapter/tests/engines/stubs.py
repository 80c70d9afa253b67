"""Imports single files of a released package, with stand-ins for everything else that they import.

The files are the real ones, as they were released, so that a wrapper meets the real classes; GPUs, and gigabytes of
other packages, are not needed for that. A stand-in is a class that is everything: base class, decorator, enum,
function.
"""

import abc
import contextlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types


class _Anything(abc.ABCMeta):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (Stand,), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args, **named):
        # A decorator gives back what it decorates.
        if len(args) == 1 and not named and (isinstance(args[0], (type, types.FunctionType))):
            return args[0]
        return super().__call__(*args, **named)

    def __iter__(cls):
        return iter(())

    def __len__(cls):
        return 0

    def __getitem__(cls, _):
        return cls


class Stand(metaclass=_Anything):
    """Stands for anything."""

    def __init_subclass__(cls, **_):
        super().__init_subclass__()

    def __init__(self, *args, **named):
        self.__dict__.update(named)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stand()

    def __call__(self, *args, **named):
        if len(args) == 1 and not named and isinstance(args[0], (type, types.FunctionType)):
            return args[0]
        return Stand()

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __bool__(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (Stand,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root, real, tops):
        self.root = root
        self.real = real
        self.tops = tops

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in self.tops:
            return None
        at = self.root.joinpath(*fullname.split("."))
        file = at.with_suffix(".py")
        if fullname in self.real and file.exists():
            return importlib.machinery.ModuleSpec(
                fullname, importlib.machinery.SourceFileLoader(fullname, str(file)), origin=str(file)
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


@contextlib.contextmanager
def imported(root, real, tops, given=()):
    """While this is open, modules below the packages ``tops`` are files of ``root``, if they are in ``real``, or
    stand-ins; ``given`` are modules of the test's own."""

    def ours(name):
        return name.split(".")[0] in tops

    before = {name: module for name, module in sys.modules.items() if ours(name)}
    for name in before:
        del sys.modules[name]
    finder = _Finder(pathlib.Path(root), set(real), set(tops))
    sys.meta_path.insert(0, finder)
    try:
        for name, module in dict(given).items():
            sys.modules[name] = module
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)
