# SPDX-License-Identifier: Apache-2.0
"""What the three wrappers share: a status becomes an exception here and nowhere else."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_SetContext
from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int32_t, uint32_t, uintptr_t

from hetccl.spi cimport *

from hetccl import errors
from hetccl.types import DType, RedOp

__all__ = ["capsule", "raise_for_status"]

cdef extern from "Python.h":
    # By plain pointer: in its destructor a capsule must not be counted up and down again.
    object PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *) noexcept)
    void *context_of "PyCapsule_GetContext"(PyObject *made) noexcept
    void PyErr_Fetch(PyObject **, PyObject **, PyObject **) noexcept
    void PyErr_Restore(PyObject *, PyObject *, PyObject *) noexcept


def raise_for_status(int status, str call, str text="", str layer=""):
    """Raises the exception that fits a `hetccl_status`; returns for OK and IN_PROGRESS.

    `call` names what was asked, `text` is the plug-in's own account, `layer` is "device", "ccl" or "transport".
    """
    if status == HETCCL_OK or status == HETCCL_IN_PROGRESS:
        return
    where = f"{layer} call {call}" if layer else call
    detail = f": {text}" if text else ""
    if status == HETCCL_UNSUPPORTED:
        raise errors.UnsupportedError(f"{where} is not supported{detail}")
    if status == HETCCL_INVALID:
        raise errors.UsageError(f"{where} refused its arguments{detail}")
    if status == HETCCL_PEER_LOST:
        raise errors.PeerLostError(f"{where}: the peer has gone{detail}", ranks=())
    if status == HETCCL_TIMED_OUT:
        raise errors.TimedOutError(f"{where} passed its deadline{detail}", phase=layer, missing=())
    if status == HETCCL_ABORTED:
        raise errors.AbortedError(f"{where} was aborted{detail}")
    if status == HETCCL_MISMATCH:
        raise errors.MismatchError(f"{where}: the ranks called different operations{detail}")
    if status == HETCCL_NO_MEMORY:
        raise errors.VendorError(f"{where} found no memory{detail}", vendor="", call=call, code=status)
    if status == HETCCL_SYSTEM and layer == "transport":
        raise errors.TransportError(f"{where} failed in the operating system{detail}", peer=None, transport="")
    if status == HETCCL_SYSTEM:
        raise errors.VendorError(f"{where} failed in the operating system{detail}", vendor="", call=call, code=status)
    if status == HETCCL_VENDOR:
        raise errors.VendorError(f"{where} failed{detail}", vendor="", call=call, code=status)
    raise errors.VendorError(f"{where} answered {status}, which is no status of spi.h{detail}", vendor="", call=call,
                             code=status)


def capsule(uintptr_t address, str name, owner=None):
    """PyCapsule around the `hetccl_table` at `address`. `name`: "device", "ccl", "transport" or the capsule's name.

    The table must outlive the capsule; `owner` is kept alive as long as the capsule.
    """
    cdef const char *c_name
    if name in ("device", "hetccl.device_ops"):
        c_name = HETCCL_DEVICE_CAPSULE
    elif name in ("ccl", "hetccl.ccl_ops"):
        c_name = HETCCL_CCL_CAPSULE
    elif name in ("transport", "hetccl.transport_ops"):
        c_name = HETCCL_TRANSPORT_CAPSULE
    else:
        raise errors.UsageError(f"no table is called {name!r}; there are device, ccl and transport")
    if address == 0:
        raise errors.UsageError(f"the address of a {name} table is 0")
    made = PyCapsule_New(<void *>address, c_name, _drop_owner)
    if owner is not None:
        Py_INCREF(owner)
        PyCapsule_SetContext(made, <void *>owner)
    return made


cdef void _drop_owner(PyObject *made) noexcept:
    cdef PyObject *kind
    cdef PyObject *value
    cdef PyObject *where
    PyErr_Fetch(&kind, &value, &where)  # an exception may be on its way while the capsule goes
    Py_XDECREF(<PyObject *>context_of(made))
    PyErr_Restore(kind, value, where)


cdef hetccl_table *table_in(object table, const char *name) except NULL:
    """The table in a capsule; a capsule of another kind is refused by name."""
    cdef hetccl_table *found
    try:
        found = <hetccl_table *>PyCapsule_GetPointer(table, name)
    except (ValueError, TypeError) as error:
        raise errors.UsageError(f"a PyCapsule called {name.decode()!r} is needed, not {table!r}") from error
    if found.ops == NULL:
        raise errors.PluginLoadError(f"the plug-in's {name.decode()} capsule holds no table")
    return found


cdef int check_head(int status, str kind, uint32_t version, uint32_t size) except -1:
    if status == HETCCL_MISMATCH:
        raise errors.PluginVersionError(
            f"the plug-in's {kind} table is of interface version {version}; this hetccl knows up to version "
            f"{HETCCL_SPI_VERSION}. Install a hetccl as new as the plug-in, or an older plug-in",
            found=version, supported=HETCCL_SPI_VERSION)
    if status != HETCCL_OK:
        raise errors.PluginLoadError(f"the plug-in's {kind} table says that it has {size} bytes, less than its own "
                                     "head; the plug-in is broken: reinstall it")
    return 0


cdef int32_t dtype_number(dtype) except -1:
    return DType[dtype.upper()].value if isinstance(dtype, str) else DType(dtype).value


cdef int32_t redop_number(redop) except -1:
    return RedOp[redop.upper()].value if isinstance(redop, str) else RedOp(redop).value


cdef str text_of(const char *text):
    return "" if text == NULL else text.decode("utf-8", "replace")
