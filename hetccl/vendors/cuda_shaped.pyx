# SPDX-License-Identifier: Apache-2.0
"""The device table of every runtime that is shaped like CUDA's, filled from data (cuda_shape.CudaShape) at run time.

Nothing here needs a vendor's headers: the shapes of calls are in cuda_device.h, the names in the data.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stdlib cimport calloc
from libc.string cimport memcpy

import sys
from functools import partial
from pathlib import Path

from hetccl.dynlib cimport Library
from hetccl.spi cimport HETCCL_DEVICE_CAPSULE, HETCCL_VENDOR

from hetccl.dynlib import open_library
from hetccl.errors import ConfigError, HetcclError, PluginLoadError, VendorError
from hetccl.vendors import cuda_kernels, cuda_spin, kernel_cache
from hetccl.vendors.nccl_shape import Status

__all__ = ["CudaRuntime", "CudaShapedDevice", "compile_kernels", "library_names"]

ctypedef hetccl_cuda_device Device
ctypedef int (*set_fn)(int) noexcept nogil
ctypedef int (*free_fn)(void *) noexcept nogil
ctypedef int (*get_fn)(int *) noexcept nogil
ctypedef int (*attribute_fn)(int *, int, int) noexcept nogil
ctypedef int (*bus_fn)(char *, int, int) noexcept nogil
ctypedef int (*plain_fn)() noexcept nogil
ctypedef const char *(*text_fn)(int) noexcept nogil
ctypedef int (*load_fn)(void **, const void *) noexcept nogil
ctypedef int (*function_fn)(void **, void *, const char *) noexcept nogil
ctypedef int (*create_fn)(void **, const char *, const char *, int, const char **, const char **) noexcept nogil
ctypedef int (*compile_fn)(void *, int, const char **) noexcept nogil
ctypedef int (*size_fn)(void *, size_t *) noexcept nogil
ctypedef int (*bytes_fn)(void *, char *) noexcept nogil
ctypedef int (*range_fn)(int *, int *) noexcept nogil
ctypedef int (*version_fn)(int *, int *) noexcept nogil
ctypedef int (*destroy_fn)(void **) noexcept nogil


@cython.final
cdef class CudaRuntime:
    """A vendor's runtime library, opened; no device is touched. Raises `PluginLoadError`."""

    def __init__(self, shape):
        self.shape = shape
        self.library = open_library(library_names(shape.libraries, shape.folders), remedy=shape.remedy, what=shape.name)

    def count(self):
        """Devices that this process can see. Raises `VendorError` with the runtime's own text (no driver, say)."""
        cdef get_fn get = <get_fn>self.find("GetDeviceCount", True)
        cdef int number = 0, code
        with nogil:
            code = get(&number)
        self.check(code, "GetDeviceCount")
        return number

    def version(self):
        """The number that RuntimeGetVersion answers, 0 where there is no such call."""
        cdef get_fn get = <get_fn>self.find("RuntimeGetVersion")
        cdef int number = 0
        if get == NULL or get(&number) != 0:
            return 0
        return number

    def attribute(self, int number, int device):
        """DeviceGetAttribute by number."""
        cdef attribute_fn get = <attribute_fn>self.find("DeviceGetAttribute", True)
        cdef int value = 0
        self.check(get(&value, number, device), "DeviceGetAttribute")
        return value

    def pci_bus_id(self, int device):
        """Where the device sits: "0000:41:00.0"."""
        cdef bus_fn get = <bus_fn>self.find("DeviceGetPCIBusId", True)
        cdef char place[64]
        self.check(get(place, 64, device), "DeviceGetPCIBusId")
        return place.decode().lower()

    cdef void *find(self, str call, bint required=False) except? NULL:
        """The runtime's function for `call` ("Malloc"), under the first of its spellings."""
        return self.library.find_call(self.shape, call, required)

    cdef int check(self, int code, str call) except -1:
        cdef text_fn words = <text_fn>self.find("GetErrorString")
        cdef plain_fn clear = <plain_fn>self.find("GetLastError")
        if code == 0:
            return 0
        if clear != NULL:
            clear()
        said = words(code).decode(errors="replace") if words != NULL else "no text"
        raise VendorError(f"{self.shape.prefix}{call}: {said} (code {code})", vendor=self.shape.name, call=call, code=code)


@cython.final
cdef class CudaShapedDevice:
    """One device, ready for use. `table` is the PyCapsule for `Vendor.device_table`; it lives as long as the process.

    Reduce and scale kernels are compiled for `arch` and loaded here, all of them: a kernel that is first launched behind
    a stream that waits would stop the whole device. Where that cannot be, `no_kernels` says why, and the table is without.
    """

    def __cinit__(self, CudaRuntime runtime not None, int index, str arch):
        self.runtime = runtime
        self.no_kernels = ""
        self.d = <Device *>calloc(1, sizeof(Device))
        if self.d == NULL:
            raise MemoryError()
        self.d.index = index
        fill_data(self.d, runtime)
        fill_calls(self.d, runtime)
        runtime.check((<set_fn>self.d.set_device)(index), "SetDevice")
        try:
            load_kernels(self.d, runtime, arch)
        except HetcclError as error:
            self.no_kernels = str(error)
            self.d.launch = NULL
        hetccl_cuda_fill_table(self.d)
        self.table = PyCapsule_New(&self.d.table, HETCCL_DEVICE_CAPSULE, NULL)


cdef int fill_data(Device *d, CudaRuntime runtime) except -1:
    cdef bytes name = runtime.shape.name.encode()[:31]
    memcpy(d.name, <const char *>name, len(name))
    d.invalid_is_host = runtime.shape.invalid_is_host
    for code in range(HETCCL_CUDA_CODES):
        d.status_of[<int>code] = HETCCL_VENDOR
    for code, status in runtime.shape.statuses.items():
        if not 0 <= code < HETCCL_CUDA_CODES or (code == 0) != (status == Status.OK):
            raise ConfigError(f"{runtime.shape.name}: result {code} as {status!r} is not covered")
        d.status_of[<int>code] = status
    types = runtime.shape.memory_types
    version = runtime.version()
    mine = types[max((since for since in types if since <= version), default=min(types))]
    for number in range(HETCCL_CUDA_TYPES):
        d.memory_of[<int>number] = mine.get(number, -1)
    return 0


cdef int fill_calls(Device *d, CudaRuntime r) except -1:
    d.set_device = r.find("SetDevice", True)
    d.get_device = r.find("GetDevice", True)
    d.clear_error = r.find("GetLastError", True)
    d.error_text = r.find("GetErrorString", True)
    d.alloc = r.find("Malloc", True)
    d.free = r.find("Free", True)
    d.host_alloc = r.find("HostAlloc", True)
    d.host_free = r.find("FreeHost", True)
    d.host_register = r.find("HostRegister")
    d.host_unregister = r.find("HostUnregister")
    d.copy = r.find("MemcpyAsync", True)
    d.fill = r.find("MemsetAsync", True)
    d.stream_create = r.find("StreamCreateWithFlags", True)
    d.stream_destroy = r.find("StreamDestroy", True)
    d.stream_sync = r.find("StreamSynchronize", True)
    d.stream_query = r.find("StreamQuery")
    d.stream_wait_event = r.find("StreamWaitEvent", True)
    d.event_create = r.find("EventCreateWithFlags", True)
    d.event_destroy = r.find("EventDestroy", True)
    d.event_record = r.find("EventRecord", True)
    d.event_query = r.find("EventQuery", True)
    d.event_sync = r.find("EventSynchronize", True)
    d.attributes = r.find("PointerGetAttributes", True)
    d.capturing = r.find("StreamIsCapturing")
    d.device_address = r.find("HostGetDevicePointer")
    d.stream_create_first = r.find("StreamCreateWithPriority")
    cdef range_fn priorities = <range_fn>r.find("DeviceGetStreamPriorityRange")
    cdef int least = 0
    if priorities == NULL or priorities(&least, &d.first_priority) != 0:
        d.stream_create_first = NULL
    d.capture_mode = r.find("ThreadExchangeStreamCaptureMode")
    return 0


cdef int load_kernels(Device *d, CudaRuntime runtime, str arch) except -1:
    cdef Library library
    cdef load_fn load
    cdef function_fn function
    cdef void *module = NULL
    cdef bytes image
    cdef const char *c_image
    cdef int code
    loader = runtime.shape.loader
    if loader is None or runtime.shape.compiler is None:
        raise PluginLoadError(f"{runtime.shape.name} has no compiler for kernels")
    library = open_library(loader.libraries, what=runtime.shape.name) if loader.libraries else runtime.library
    load = <load_fn>library.find(loader.load_data)
    function = <function_fn>library.find(loader.get_function)
    d.launch = library.find(loader.launch)
    if load == NULL or function == NULL or d.launch == NULL:
        raise PluginLoadError(f"{runtime.shape.name}: {library.path} cannot load kernels")
    if runtime.shape.loader.libraries:
        d.memory_handle = library.find("cuMemGetHandleForAddressRange")
    else:
        d.memory_handle = runtime.find("MemGetHandleForAddressRange")
    source = cuda_kernels.kernel_source()
    parts = image_parts(runtime.shape.compiler, arch, source)
    make = partial(compile_kernels, runtime.shape.compiler, arch, source)
    image, kept = kernel_cache.cached(parts, make)
    c_image = image
    (<free_fn>d.free)(NULL)          # makes the device's context, which the loader works in
    with nogil:
        code = load(&module, c_image)
    if code != 0 and kept:           # made for something that we do not look at, a driver for instance
        kernel_cache.forget(parts)
        image, kept = kernel_cache.cached(parts, make)
        c_image = image
        with nogil:
            code = load(&module, c_image)
    if code != 0:
        raise VendorError(f"{runtime.shape.name}: {loader.load_data} refuses the kernels for {arch} (code {code})",
                          vendor=runtime.shape.name, call=loader.load_data, code=code)
    for dtype, redop in cuda_kernels.kernels():
        d.kernel[<int>dtype][<int>redop] = kernel(runtime, function, module, cuda_kernels.kernel_name(dtype, redop))
    for dtype in cuda_kernels.spinning():
        d.resident[<int>dtype] = kernel(runtime, function, module, cuda_spin.resident_name(dtype.label))
        d.words[<int>dtype] = kernel(runtime, function, module, cuda_spin.words_name(dtype.label))
    return 0


cdef void *kernel(CudaRuntime runtime, function_fn function, void *module, str name) except NULL:
    cdef void *found = NULL
    cdef bytes text = name.encode()
    cdef int code = function(&found, module, <const char *>text)
    if code != 0 or found == NULL:
        raise VendorError(f"{runtime.shape.name}: no kernel {name} (code {code})", vendor=runtime.shape.name,
                          call=runtime.shape.loader.get_function, code=code)
    return found


def image_parts(compiler, str arch, str source):
    """All that an image depends on. Raises `PluginLoadError` if there is no compiler."""
    cdef Library library = open_library(library_names(compiler.libraries, compiler.folders), what="kernel compiler")
    cdef version_fn version = <version_fn>library.find(compiler.prefix + "Version")
    cdef int major = 0, minor = 0
    if version != NULL:
        version(&major, &minor)
    options = [option.format(arch=arch) for option in compiler.options]
    return [source, arch, *options, f"{compiler.prefix} {major}.{minor}", kernel_cache.identity(library.path)]


def compile_kernels(compiler, str arch, str source):
    """Machine code of `source` for `arch`, by the vendor's compiler. Raises `PluginLoadError`, `VendorError`."""
    cdef Library library = open_library(library_names(compiler.libraries, compiler.folders), what="kernel compiler")
    cdef create_fn create = <create_fn>library.find(compiler.prefix + "CreateProgram")
    cdef compile_fn build = <compile_fn>library.find(compiler.prefix + "CompileProgram")
    cdef size_fn log_size = <size_fn>library.find(compiler.prefix + "GetProgramLogSize")
    cdef bytes_fn log = <bytes_fn>library.find(compiler.prefix + "GetProgramLog")
    cdef size_fn code_size = <size_fn>library.find(compiler.get_code + "Size")
    cdef bytes_fn get_code = <bytes_fn>library.find(compiler.get_code)
    cdef destroy_fn destroy = <destroy_fn>library.find(compiler.prefix + "DestroyProgram")
    cdef void *program = NULL
    cdef const char *c_options[16]
    cdef bytes text = source.encode()
    cdef const char *c_text = text
    cdef size_t n = 0
    cdef int code, n_options, i
    if create == NULL or build == NULL or code_size == NULL or get_code == NULL or destroy == NULL:
        raise PluginLoadError(f"{library.path} is no compiler for kernels: it lacks calls of {compiler.prefix}")
    if compiler.companions:
        for path in sorted(Path(library.path).parent.glob(compiler.companions)):
            open_library(str(path), what="kernel compiler")
    options = [option.format(arch=arch).encode() for option in compiler.options][:16]
    n_options = len(options)
    for i in range(n_options):
        c_options[i] = options[i]
    code = create(&program, c_text, b"hetccl.cu", 0, NULL, NULL)
    if code == 0:
        with nogil:
            code = build(program, n_options, c_options)
    if code != 0:
        said = ""
        if log_size != NULL and log != NULL and program != NULL and log_size(program, &n) == 0 and n > 1:
            room = bytearray(n + 1)
            log(program, room)
            said = bytes(room[:n]).rstrip(b"\0").decode(errors="replace")
        if program != NULL:
            destroy(&program)
        raise VendorError(f"{library.path} does not compile hetccl's kernels for {arch} (code {code}): {said[:2000]}",
                          vendor=compiler.prefix, call="CompileProgram", code=code)
    code = code_size(program, &n)
    image = bytearray(n + 1)
    if code == 0:
        code = get_code(program, image)
    destroy(&program)
    if code != 0:
        raise VendorError(f"{library.path} gives no code (code {code})", vendor=compiler.prefix, call=compiler.get_code,
                          code=code)
    return bytes(image)


def library_names(libraries, folders):
    """`libraries`, then the files of the same names in `folders` below the folders of Python packages."""
    found = list(libraries)
    for site in sys.path:
        for folder in folders:
            for path in sorted(Path(site or ".").glob(folder)) if site else ():
                found += [str(path / name) for name in libraries if "/" not in name and (path / name).is_file()]
    return tuple(found)
