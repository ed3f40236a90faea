"""All areas of cases, in the order of their letters; S, stage 3, has rows of several areas."""

from cases import (  # noqa: F401
    area_a_graph,
    area_b_shapes,
    area_c_dtypes,
    area_d_groups,
    area_e_reduction,
    area_f_clipping,
    area_g_arithmetic,
    area_i_checkpoints,
    area_j_agreement,
    area_s_stage3,
)
