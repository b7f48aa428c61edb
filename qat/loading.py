"""Loading of a run's model.

The training script is imported late, so that `import qat` stays light.
"""

import copy
import os
import warnings
from pathlib import Path

import torch
from torch import nn


def load(path: str | os.PathLike[str], float_model: nn.Module | None = None) -> nn.Module:
    """Load the model of a run of `train.py`, with its weights as evaluated.

        model = qat.load("runs/x")
        with torch.no_grad():
            scores = model(model.transform("cat.jpg")).softmax(1)
        print(model.classes[scores.argmax()])

    The model is the prepared one, or the float model if the checkpoint is of a run's float stage, in eval mode on the
    CPU. Nothing is downloaded, and the data are not read; the folder may have been moved. It has

    - `model.classes`: the names of the classes, a list;
    - `model.transform`: called with a path, a PIL image, a uint8 array (H, W, 3) or a uint8 tensor (3, H, W), returns
      what validation feeds the model, a float32 tensor (1, 3, height, width); it can be pickled;
    - `model.config`: the run's config with all defaults, `model.config.data.image_size`;
    - `model.accuracy`: top-1 of these weights on the validation split, in percent.

    A model with an attribute of one of these names keeps its own. A warning says if the folder's run is not finished,
    and at which epoch it is.

    The parameters require gradients, so that the model can be trained on; predict under `torch.no_grad()`.

    Args:
        path: a run folder, its best.pt or its last.pt. Of a folder, the weights that model.onnx and the table are of.
        float_model: the float model, if the run trained a model of your own (`package.module:callable`): no code is
            imported because a file names it. It is not changed.

    Raises:
        TypeError: if path is not a path, or float_model is not an nn.Module.
        ValueError: if the file does not exist, is damaged or not a checkpoint; if the model is your own and was not
            given; or if a rule or target is not registered.
    """
    from qat.training.errors import UserError

    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"load: path must be text or a Path, got {type(path).__name__}")
    if not isinstance(float_model, nn.Module | None):
        raise TypeError(f"load: float_model must be a torch.nn.Module, got {type(float_model).__name__}")
    try:
        with torch.inference_mode(False):  # the model can be trained on, wherever it is loaded
            return _load(Path(os.path.expanduser(path)), float_model)
    except UserError as error:
        sentence = str(error)
    raise ValueError(f"load: {sentence}")  # outside of the handler, so that no trainer's traceback is shown


def _load(path: Path, float_model: nn.Module | None) -> nn.Module:
    from qat.training.config.file import load_config
    from qat.training.config.schema import RunConfig
    from qat.training.data.images import InputTransform
    from qat.training.errors import UserError, looked_in, problems_of, value_errors_reported
    from qat.training.model import build_model, prepare_model
    from qat.training.run import checkpoint, folder
    from qat.training.tasks.known import score_of

    if not path.exists():
        raise UserError(f"'{path}' does not exist{looked_in(path)}")
    file = path
    if path.is_dir():
        if not (path / folder.RESOLVED_CONFIG).is_file():
            raise UserError(f"'{path}' has no {folder.RESOLVED_CONFIG}; give the folder of a run of train.py")
        resolved = load_config(str(path / folder.RESOLVED_CONFIG))
        best = resolved.export.weights == "best" or resolved.qat.epochs == 0
        file = path / (folder.BEST_CHECKPOINT if best else folder.LAST_CHECKPOINT)
        if not file.is_file():
            raise UserError(f"'{path}' has no {file.name}, whose weights its model.onnx has; give another file")
    payload = checkpoint.load_checkpoint(file, "give a run folder, its best.pt or its last.pt")
    stage, about = payload["stage"], payload["about"]
    if path.is_dir() and folder.read_summary(path) is None:
        epochs = payload["config"]["float" if stage == "float" else "qat"]["epochs"]
        model_of = "the quantized" if stage == "qat" else "a float"
        warnings.warn(
            f"load: '{path}': the run is not finished; {file.name} has {model_of} model after epoch"
            f" {payload['epochs']} of {epochs}, stage {stage}",
            stacklevel=3,
        )
    config = RunConfig.model_validate(payload["config"])
    if float_model is None and ":" in config.model.name:
        raise UserError(
            f"{file}: its model is your own, '{config.model.name}', and no code is imported because a file names it;"
            " pass the float model, qat.load(path, float_model=...)"
        )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay
        if float_model is None:
            model = build_model(config.model, len(about["classes"]), with_weights=False)
        else:
            model = copy.deepcopy(float_model)
        if stage == "qat":
            size = config.data.image_size
            with problems_of(str(file)):  # such as rules and targets that are not registered
                model = prepare_model(model, config, (3, size, size))
    checkpoint.load_evaluated(file, payload, model)
    with value_errors_reported(f"{file}: "):
        transform = InputTransform(checkpoint.preprocessing_of(about))
    found = {"classes": about["classes"], "transform": transform, "config": config}
    for name, value in {**found, "accuracy": score_of(payload["evaluation"])}.items():
        if not hasattr(model, name):
            setattr(model, name, value)
    return model.eval()
