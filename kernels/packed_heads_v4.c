/* The heads for x86-64-v4; empty where the compiler cannot choose at run time. */

#include "packed_formats.h"

#ifdef HAS_VARIANTS
#pragma GCC target("arch=x86-64-v4")
#define SUFFIX v4
#include "packed_heads.h"
#endif
