# The module for CUDA, where nvcc is found. It loads beside torch, whatever CUDA runtime torch brings: its own is linked in.

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(BMT_CUDA STREQUAL ON)
    message(FATAL_ERROR "BMT_CUDA=ON, and no nvcc is found. Put it on PATH, or set CUDACXX.")
  endif()
  message(STATUS "bmt-kernels: no nvcc is found, so the CUDA module is left out")
  return()
endif()

find_package(CUDAToolkit)
if(CUDAToolkit_VERSION VERSION_LESS 12.4)
  if(BMT_CUDA STREQUAL ON)
    message(FATAL_ERROR "BMT_CUDA=ON, and ${CMAKE_CUDA_COMPILER} is of CUDA ${CUDAToolkit_VERSION}. It must be 12.4 or later.")
  endif()
  message(STATUS "bmt-kernels: CUDA ${CUDAToolkit_VERSION} is older than 12.4, so the CUDA module is left out")
  return()
endif()

# Semicolons or commas between numbers such as 80, 90a, 100-real; see CMAKE_CUDA_ARCHITECTURES in CMake's manual.
if(DEFINED ENV{BMT_CUDA_ARCHITECTURES} AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  string(REPLACE "," ";" CMAKE_CUDA_ARCHITECTURES "$ENV{BMT_CUDA_ARCHITECTURES}")
elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES all-major)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_ARCHITECTURES STREQUAL all-major AND CUDAToolkit_VERSION VERSION_LESS 13)
  # Without those before sm_70, whose kernels take fewer parameters.
  set(CMAKE_CUDA_ARCHITECTURES 70 80 90)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

pybind11_add_module(
  _cuda NO_EXTRAS
  csrc/cuda/module.cpp
  csrc/cuda/adam.cu
  csrc/cuda/architectures.cu
  csrc/cuda/casts.cu
  csrc/cuda/cross_entropy.cu
  csrc/cuda/gradients.cu
)
set_source_files_properties(csrc/cuda/module.cpp PROPERTIES COMPILE_OPTIONS -O1)
set_target_properties(_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
target_include_directories(_cuda PRIVATE csrc)
target_link_libraries(_cuda PRIVATE CUDA::cudart_static)
target_compile_options(
  _cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>
)
message(STATUS "bmt-kernels: CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")

install(TARGETS _cuda LIBRARY DESTINATION bmt_kernels)
