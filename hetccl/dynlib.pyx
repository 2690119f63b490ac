# SPDX-License-Identifier: Apache-2.0
"""Opens the shared libraries of vendors: by handle, with local symbols, once, and never closes them.

Several vendors export the same names, so a symbol is only ever looked up in its own library. Vendor libraries start
threads and keep thread-local state; unloading one crashes sooner or later, so nothing here does.
"""

cimport cython

import threading

from hetccl.errors import PluginLoadError

__all__ = ["Library", "open_library"]

cdef extern from "<link.h>" nogil:
    struct link_map:
        char *l_name

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *path, int flags)
    void *dlsym(void *handle, const char *symbol)
    char *dlerror()
    int dlinfo(void *handle, int request, void *info)
    int RTLD_NOW
    int RTLD_LOCAL
    int RTLD_NOLOAD
    int RTLD_DEEPBIND
    int RTLD_DI_LINKMAP


@cython.final
cdef class Library:
    """An open shared library. Made by `open_library`.

    `name` is what it was asked for by, `path` the file that the loader took, `shared` True if somebody else in this
    process (torch, say) had loaded it before.
    """

    def __init__(self):
        raise TypeError("open a library with open_library()")

    def symbol(self, str name):
        """Address of `name` in this library (and what it depends on), or None."""
        cdef void *address = self.find(name)
        return None if address == NULL else <size_t>address

    cdef void *find(self, str symbol) except? NULL:
        cdef bytes encoded = symbol.encode()
        cdef const char *c_name = encoded
        return dlsym(self.handle, c_name)

    cdef void *find_call(self, shape, str call, bint required) except? NULL:
        """The function for `call` ("AllReduce"), under the first of its spellings. `shape` is the data of a family of
        libraries: prefix, spellings, calls that are missing, name and remedy. Raises `PluginLoadError` where a required
        one is not there."""
        cdef void *address = NULL
        names = shape.spellings.get(call, (shape.prefix + call,))
        if call not in shape.missing:
            for name in names:
                address = self.find(name)
                if address != NULL:
                    return address
        if required:
            raise PluginLoadError(
                f"{shape.name}: {self.path} has no {' or '.join(names)}, so it is not the library it seems to be, or far "
                f"too old. {shape.remedy}", library=self.path, symbol=names[0])
        return NULL

    def __repr__(self):
        return f"<Library {self.path}>"


def open_library(names, bint deepbind=False, str remedy="", str what=""):
    """The first of `names` (full paths or sonames) that this process has loaded already, else the first that opens.

    `deepbind` makes the library prefer its own symbols over those that others have made global. A library opened once
    stays open and is handed out again. Raises `PluginLoadError` with each name tried, the loader's own words and
    `remedy`, what the user can do; `what` says what the library is for.
    """
    if isinstance(names, str):
        names = (names,)
    failures = []
    with _lock:
        for flags in (RTLD_NOLOAD, RTLD_DEEPBIND if deepbind else 0):
            for name in names:
                library = _opened.get(name) or _open(name, flags, failures)
                if library is not None:
                    _opened[name] = library
                    return library
    asked = f"{what}: " if what else ""
    raise PluginLoadError(
        f"{asked}cannot load {' or '.join(names)}. " + "; ".join(failures) + (f". {remedy}" if remedy else ""),
        names=tuple(names), failures=tuple(failures), remedy=remedy)


_lock = threading.Lock()
_opened = {}


cdef Library _open(str name, int extra, list failures):
    """`extra`: RTLD_NOLOAD takes only what is loaded already, and its failure is none."""
    cdef bytes encoded = name.encode(errors="surrogateescape")
    cdef const char *c_name = encoded
    cdef void *handle
    cdef char *text
    cdef link_map *where = NULL
    cdef bint shared = extra == RTLD_NOLOAD
    if not name or "\0" in name:
        raise PluginLoadError(f"{name!r} is no name of a library")
    with nogil:
        handle = dlopen(c_name, RTLD_NOW | RTLD_LOCAL | extra)
    if handle == NULL:
        text = dlerror()
        if not shared:
            failures.append("the loader says: " + ("nothing" if text == NULL else text.decode(errors="replace")))
        return None
    cdef Library library = Library.__new__(Library)
    library.handle = handle
    library.name = name
    library.shared = shared
    library.path = name
    if dlinfo(handle, RTLD_DI_LINKMAP, &where) == 0 and where != NULL and where.l_name[0] != 0:
        library.path = where.l_name.decode(errors="surrogateescape")
    return library
