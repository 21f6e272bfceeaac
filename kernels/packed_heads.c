/* The heads for the instruction set that the compiler was asked for. */

#define SUFFIX base
#include "packed_heads.h"
