// SPDX-License-Identifier: Apache-2.0
//
// What the headers of newer compilers refer to, for C and C++ libraries that do not
// have it; cmake/nwor/older_glibc.py is about the rest. No other library sees these.
#include <new>
#include <sstream>

#define NWOR_HIDDEN extern "C" __attribute__((visibility("hidden")))

// Since glibc 2.32; shared_ptr leaves out atomic operations if it is true.
NWOR_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// Constructors without arguments, since GCC 9.
NWOR_HIDDEN void nwor_ostringstream(void* self) asm(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void nwor_ostringstream(void* self) {
  ::new (self) std::ostringstream(std::ios_base::out);
}
NWOR_HIDDEN void nwor_stringstream(void* self) asm(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void nwor_stringstream(void* self) {
  ::new (self) std::stringstream(std::ios_base::in | std::ios_base::out);
}
