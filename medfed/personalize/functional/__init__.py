"""The pure maths of the algorithms: tensors in, tensors out, no federation type."""

from medfed.personalize.functional.fused_lasso_exact import fused_lasso, fused_lasso_blocks
from medfed.personalize.functional.fused_lasso_splitting import FusedLassoResult, fused_lasso_admm
from medfed.personalize.functional.graph import (
    complete_edges,
    edge_similarity,
    edges_from_file,
    edges_from_names,
    knn_edges,
    ring_edges,
    star_edges,
    undirected_edges,
)
from medfed.personalize.functional.graph_algebra import (
    connected_components,
    graph_laplacian,
    incidence,
)
from medfed.personalize.functional.kmeans import initial_centers
from medfed.personalize.functional.lasso import (
    LassoResult,
    LassoState,
    network_lasso,
    solve_network_lasso,
)
from medfed.personalize.functional.membership import (
    cosine_affinity,
    coupling,
    exponentiated_gradient,
    laplacian,
)
from medfed.personalize.functional.prox import check_norm, dual_norm, project_l1_ball, prox_norm
from medfed.personalize.functional.quantization import (
    assign,
    prox_quantize,
    prox_weights,
    quantize,
    soft_quantize,
)
from medfed.personalize.functional.quantization_centers import (
    center_gradient,
    prox_centers,
    step_centers,
)
from medfed.personalize.functional.sketches import (
    data_sketch,
    feature_sketch,
    frequent_directions,
    label_sketch,
    model_sketch,
    sketch_vector,
    symmetric_vector,
)

__all__ = [
    "FusedLassoResult",
    "LassoResult",
    "LassoState",
    "assign",
    "center_gradient",
    "check_norm",
    "complete_edges",
    "connected_components",
    "cosine_affinity",
    "coupling",
    "data_sketch",
    "dual_norm",
    "edge_similarity",
    "edges_from_file",
    "edges_from_names",
    "exponentiated_gradient",
    "feature_sketch",
    "frequent_directions",
    "fused_lasso",
    "fused_lasso_admm",
    "fused_lasso_blocks",
    "graph_laplacian",
    "incidence",
    "initial_centers",
    "knn_edges",
    "label_sketch",
    "laplacian",
    "model_sketch",
    "network_lasso",
    "project_l1_ball",
    "prox_centers",
    "prox_norm",
    "prox_quantize",
    "prox_weights",
    "quantize",
    "ring_edges",
    "sketch_vector",
    "soft_quantize",
    "solve_network_lasso",
    "star_edges",
    "step_centers",
    "symmetric_vector",
    "undirected_edges",
]
