# The module for the CPU. Kernels are compiled once per instruction set, each file with flags of its own; which one runs is
# decided at run time.

# Without extras: link-time optimisation would mix code of different instruction sets.
pybind11_add_module(
  _cpu NO_EXTRAS
  csrc/cpu/module.cpp
  csrc/cpu/adam.cpp
  csrc/cpu/casts.cpp
  csrc/cpu/cross_entropy.cpp
  csrc/cpu/gradients.cpp
  csrc/cpu/kernels_portable.cpp
  csrc/cpu/processor.cpp
  csrc/cpu/square_root.cpp
)
target_include_directories(_cpu PRIVATE csrc)
# See [Note: the threads of OpenMP]; without it, everything runs on one thread.
if(OpenMP_CXX_FOUND)
  target_link_libraries(_cpu PRIVATE OpenMP::OpenMP_CXX)
endif()
# No contraction: where a product and a sum are rounded once, the source says so.
# Under the sanitizers nothing is optimised: what they look for is in the source, and optimising what they add takes long.
set(bmt_kernel_flags $<IF:$<BOOL:${BMT_SANITIZE}>,-O0,-O3> -ffp-contract=off -fno-math-errno -fno-trapping-math)
target_compile_options(_cpu PRIVATE -Wall -Wextra -Wshadow $<$<BOOL:${BMT_WERROR}>:-Werror>)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  target_compile_definitions(_cpu PRIVATE BMT_X86)
  target_sources(_cpu PRIVATE csrc/cpu/kernels_avx2.cpp csrc/cpu/kernels_avx512.cpp)
  # The warning is about the headers of GCC 11 to 13, whose "undefined" vectors are initialised with themselves.
  set(bmt_avx512_flags -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -Wno-maybe-uninitialized -Wno-uninitialized)
  set_source_files_properties(
    csrc/cpu/kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS "${bmt_kernel_flags};-mavx2;-mfma;-mf16c"
  )
  set_source_files_properties(
    csrc/cpu/kernels_avx512.cpp
    PROPERTIES COMPILE_OPTIONS "${bmt_kernel_flags};${bmt_avx512_flags}"
  )
endif()
set_source_files_properties(csrc/cpu/kernels_portable.cpp PROPERTIES COMPILE_OPTIONS "${bmt_kernel_flags}")

# Bindings only hand on what Python passes: optimising them takes longest and brings nothing.
set(bmt_bindings_flags $<IF:$<BOOL:${BMT_SANITIZE}>,-O0,-O1>)
set_source_files_properties(csrc/cpu/module.cpp PROPERTIES COMPILE_OPTIONS ${bmt_bindings_flags})
# Set by cuda.cmake.
if(bmt_without_cuda)
  set_source_files_properties(
    csrc/cpu/module.cpp PROPERTIES COMPILE_DEFINITIONS "BMT_WITHOUT_CUDA=\"${bmt_without_cuda}\""
  )
endif()

if(BMT_SANITIZE)
  set(bmt_sanitizers -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O0)
  target_compile_options(_cpu PRIVATE ${bmt_sanitizers})
  target_link_options(_cpu PRIVATE -fsanitize=address,undefined)
endif()

install(TARGETS _cpu LIBRARY DESTINATION bmt_kernels)
