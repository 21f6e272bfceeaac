"""Numbers of the documented interface that several parts read."""

SQRT_PI_OVER_2 = 1.2533141373155001
"""sqrt(π/2): turns a mean of signs back into an inner product."""
UPPER_MSE_FACTOR = 1.5349900619197328
"""Squared error of a rotated scalar code is at most this times 4^-b."""
LOWER_MSE_FACTOR = 1.0
"""No code of b bits a coordinate has less than this times 4^-b."""

LLOYD_MAX_N_ITER = 5000
LLOYD_MAX_TOL = 1e-9
LLOYD_MAX_N_QUAD = 10000
MIN_CELL_MASS = 1e-12
VORONOI_LINEAR_THRESHOLD = 16
"""Up to so many levels a code counts thresholds; beyond, it searches."""

DEFAULT_SEED = 42
DEFAULT_JL_DIM = 128
DEFAULT_POLAR_LEVELS = 4
DEFAULT_N_OUTLIER_CHANNELS = 4
DEFAULT_N_CALIB_TOKENS = 200

INT8_MAX = 127
INT8_MIN = -127
