"""A detector's file that answers with boxes: decoding and non-maximum suppression inside."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from qat.export.onnxruntime.session import open_session, run_session
from qat.training.loop.evaluation import evaluate
from qat.training.loop.stage import Batches
from qat.training.run.folder import Json, replacing
from qat.training.tasks.decoding import OUTPUTS, Decoder
from qat.training.tasks.task import Task

END_TO_END = "end_to_end.onnx"

# Boxes of two corners are the same to it in any order of the axes. Its answer: image, class, anchor.
SUPPRESSION = """
<ir_version: 10, opset_import: ["" : 18]>
suppression (float[N, A, 4] boxes, float[N, K, A] scores) => (float[D, 7] detections)
<int64[1] most = {{{most}}}, float[1] overlap = {{{overlap}}}, float[1] least = {{{least}}}, int64[2] ends = {{0, 2}},
 int64[1] last = {{1}}, int64[2] two = {{0, 1}}, int64[3] shift = {{0, {first}, 0}}> {{
    chosen = NonMaxSuppression (boxes, scores, most, overlap, least)
    places = Gather <axis = 1> (chosen, ends)
    corners = GatherND (boxes, places)
    likely = GatherND (scores, chosen)
    named = Add (chosen, shift)
    numbers = Cast <to = 1> (named)
    both = Gather <axis = 1> (numbers, two)
    column = Unsqueeze (likely, last)
    rows = Concat <axis = 1> (both, column, corners)
    count = Shape (likely)
    sorted, order = TopK (likely, count)
    detections = Gather <axis = 0> (rows, order)
}}
"""


def export_end_to_end(source: Path, model: nn.Module, image: Tensor, batches: Batches, task: Task) -> Json:
    """Write the file beside `source`, run it over the batches, and return its score and size."""
    path, decoder = source.with_name(END_TO_END), model.decoder
    assert isinstance(decoder, Decoder)
    write_end_to_end(source, path, decoder, image)
    found = evaluate(model, batches, image.device, forward=partial(run_session, open_session(path)), task=task)
    return {task.metric: found.score, "size_bytes": path.stat().st_size}


def write_end_to_end(source: Path, path: Path, decoder: Decoder, image: Tensor) -> None:
    """Write a file of `source` and the detector's decoding, for images of the size of `image`, (1, 3, H, W).

    Its output `detections`, (boxes, 7), holds the number of the image in the batch, the label, the score, and left,
    top, right and bottom in pixels, best scores first. As the detector does, it keeps boxes above `score_thresh` and
    suppresses by `nms_thresh` in each class; `detections_per_img` is the most of a class.
    """
    model, detector = onnx.load(source), decoder.detector
    shapes = {end.name: [axis.dim_value for axis in end.type.tensor_type.shape.dim][1:] for end in model.graph.output}
    names = [name for name in OUTPUTS if name in shapes]
    decoding = _Decoding(decoder, (image.shape[2], image.shape[3])).eval()
    examples = tuple(torch.zeros(2, *shapes[name]) for name in names)
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own code
        program: Any = torch.onnx.export(
            decoding, examples, dynamo=True, opset_version=18, dynamic_shapes=(({0: batch},) * len(names),),
            verbose=False, input_names=names, output_names=["boxes", "scores"],
        )  # fmt: skip
    text = SUPPRESSION.format(
        most=detector.detections_per_img, overlap=detector.nms_thresh, least=detector.score_thresh, first=decoding.first
    )
    version = model.opset_import[0].version
    parts = [
        onnx.version_converter.convert_version(each, version)
        for each in (program.model_proto, onnx.parser.parse_model(text))
    ]
    for prefix, each in zip(("decoding_", "suppression_"), parts, strict=True):
        onnx.compose.add_prefix(each, prefix, rename_inputs=False, rename_outputs=False, inplace=True)
        each.ir_version = model.ir_version
        ends = [(end.name, end.name) for end in each.graph.input]
        notes = [(entry.key, entry.value) for entry in model.metadata_props]
        model = onnx.compose.merge_models(model, each, ends)
    onnx.helper.set_model_props(model, dict(notes))
    with replacing(path) as temporary:
        onnx.save(model, temporary)


class _Decoding(nn.Module):
    # From a network's outputs to boxes (N, A, 4) in pixels and scores (N, K, A), by the detector's own coder.
    anchors: Tensor

    def __init__(self, decoder: Decoder, size: tuple[int, int]) -> None:
        super().__init__()
        from torchvision.models.detection.ssd import SSD

        self.size, coder = size, decoder.detector.box_coder
        self.decode = getattr(coder, "decode_single", coder.decode)
        self.register_buffer("anchors", decoder.anchors(size))
        self.first = int(isinstance(decoder.detector, SSD))  # class; SSD scores the background too

    def forward(self, *outputs: Tensor) -> tuple[Tensor, Tensor]:
        from torchvision.ops import clip_boxes_to_image

        logits, offsets, *centerness = outputs
        anchors = self.anchors.expand(offsets.shape[0], -1, -1).reshape(-1, 4)
        boxes = clip_boxes_to_image(self.decode(offsets.reshape(-1, 4), anchors), self.size).reshape(offsets.shape)
        scores = logits.softmax(2)[:, :, 1:] if self.first else logits.sigmoid()
        if centerness:
            scores = (scores * centerness[0].sigmoid()).sqrt()
        return boxes, scores.transpose(1, 2)
