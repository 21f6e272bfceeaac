/* The heads for x86-64-v3; empty where the compiler cannot choose at run time. */

#include "packed_formats.h"

#ifdef HAS_VARIANTS
#pragma GCC target("arch=x86-64-v3")
#define SUFFIX v3
#include "packed_heads.h"
#endif
