# The module for NCCL: no CUDA is needed to build it, as NCCL and the CUDA driver are opened when it is used.

find_package(Threads REQUIRED)
pybind11_add_module(
  _nccl NO_EXTRAS
  csrc/nccl/module.cpp
  csrc/nccl/communicator.cpp
  csrc/nccl/engine.cpp
  csrc/nccl/library.cpp
)
target_include_directories(_nccl PRIVATE csrc)
target_link_libraries(_nccl PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
# Set by cpu.cmake.
set_source_files_properties(csrc/nccl/module.cpp PROPERTIES COMPILE_OPTIONS ${bmt_bindings_flags})
target_compile_options(_nccl PRIVATE -Wall -Wextra -Wshadow $<$<BOOL:${BMT_WERROR}>:-Werror>)
if(BMT_SANITIZE)
  target_compile_options(_nccl PRIVATE ${bmt_sanitizers})
  target_link_options(_nccl PRIVATE -fsanitize=address,undefined)
endif()

install(TARGETS _nccl LIBRARY DESTINATION bmt_kernels)
