"""`.onnx`: the computation for ONNX Runtime and others; classes and preprocessing stand in its metadata."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from echelon.core.errors import UserError
from echelon.inference.exports.base import ExportFormat, Predictor, cannot_be_traced, description
from echelon.inference.exports.torch_program import as_named, quiet, traced
from echelon.run.trained import TrainedModel
from echelon.tasks import nest
from echelon.tasks.nest import Nest

_SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter says of a node which modules it is of
_FAR = 1e-3  # of a layer's largest output: what is further from the model's own is another function


class OnnxFile(ExportFormat):
    """A graph of ONNX, written by `torch.onnx` and run by ONNX Runtime."""

    def write(self, trained: TrainedModel, path: Path, example: Nest) -> None:
        """Trace the model, and write its graph with the weights in it."""
        _check_installed(path)
        program = traced(trained, path, example)
        try:
            with quiet():
                graph = torch.onnx.export(
                    program, dynamo=True, verbose=False, output_names=_output_names(trained, program)
                )
        except Exception as error:
            raise cannot_be_traced(path, error) from error
        assert graph is not None
        for name, text in description(trained).items():
            graph.model.metadata_props[name] = text
        graph.model.metadata_props["names"] = json.dumps(
            {str(i): name for i, name in enumerate(trained.info.classes)}, ensure_ascii=False
        )
        graph.save(path, external_data=False)

    def read(self, trained: TrainedModel, path: Path) -> Predictor:
        """Return a session of ONNX Runtime on the CPU."""
        session = _session(str(path))
        names = [each.name for each in session.get_inputs()]
        like: list[Nest] = []

        def run(inputs: Nest) -> Nest:
            """Return what the graph gives, in the containers of the model's own outputs."""
            if not like:
                with torch.no_grad():
                    like.append(nest.call(trained.model, nest.take(inputs, slice(0, 1))))
            values = session.run(None, {k: v.numpy() for k, v in as_named(inputs, names).items()})
            return nest.rebuild(like[0], iter(torch.from_numpy(value) for value in values))

        return run

    def first_difference(self, trained: TrainedModel, path: Path, inputs: Nest) -> str:
        """Return the first module, in the order of the computation, whose outputs the graph gives otherwise."""
        import onnx

        model = onnx.load(path)
        last = _last_outputs(model)
        known = {each.name for each in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in last.values() if name not in known)
        session = _session(model.SerializeToString())
        names = [each.name for each in session.get_inputs()]
        wanted = list(last.values())
        values = session.run(wanted, {k: v.numpy() for k, v in as_named(inputs, names).items()})
        given = dict(zip(last, (torch.from_numpy(value) for value in values), strict=True))
        return next((name for name, own in _outputs_of(trained.model, inputs) if _differs(own, given.get(name))), "")


def _output_names(trained: TrainedModel, program: ExportedProgram) -> list[str] | None:
    """Return a name for the one output of a model of classes; None: the outputs are called as in the graph."""
    is_one = len(program.graph_signature.user_outputs) == 1
    return ["logits"] if is_one and trained.info.classes else None


def _check_installed(path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path}: {error.name} is not installed: pip install 'echelon[export]'") from None


def _session(model: str | bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _last_outputs(model: Any) -> dict[str, str]:
    """Return the value that each module computes last, by the module's name, in the order of the graph."""
    last: dict[str, str] = {}
    for node in model.graph.node:
        scopes = next((each.value for each in node.metadata_props if each.key == _SCOPES), "")
        names = ast.literal_eval(scopes)[1:-1] if scopes.startswith("[") else []
        if names:
            last.pop(names[-1], None)
            last[names[-1]] = node.output[0]
    return last


def _outputs_of(model: nn.Module, inputs: Nest) -> list[tuple[str, Tensor]]:
    """Return the tensors that modules give for some inputs, by their names, in the order in which they end."""
    given: list[tuple[str, Tensor]] = []
    hooks = []
    for name, module in model.named_modules():
        if name:

            def keep(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                """Note what a module gives."""
                if isinstance(output, Tensor):
                    given.append((name, output.detach().clone()))

            hooks.append(module.register_forward_hook(keep))
    try:
        with torch.no_grad():
            nest.call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return given


def _differs(expected: Tensor, output: Tensor | None) -> bool:
    if output is None or expected.shape != output.shape:  # the graph may have joined its last steps with others
        return False
    return float((expected - output).abs().max()) > _FAR * max(float(expected.abs().max()), 1e-12)
