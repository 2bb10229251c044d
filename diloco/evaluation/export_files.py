# SPDX-License-Identifier: Apache-2.0
"""Makes the files beside the tensors of an exported model."""

import json
import pathlib
import re
from collections.abc import Mapping

from diloco.config.pretrained import CONFIG, OF_TOKENIZER
from diloco.data.tasks import read_questions
from diloco.data.tokenizers import Tokenizer
from diloco.evaluation.final_evaluation import choice_rows
from diloco.models import hf_format
from diloco.models.decoder_config import DecoderConfig


def exported_files(
  sizes: DecoderConfig,
  seq_len: int,
  tokenizer: Tokenizer,
  came_with: Mapping[str, bytes] | None = None,
) -> dict[str, Mapping | bytes]:
  """Returns what lies beside the tensors, by its name.

  Args:
    came_with: files of the model that training started from: config.json, and
      those of its tokenizer, which stay as they are if it is that of the run.
  """
  came_with = came_with or {}
  name, content = tokenizer.exported
  kind = tokenizer.name.partition(':')[0]
  note = (
    f'Tokens are those of {kind!r}, {f"in {name}" if name else "not exported"};'
    f' token {tokenizer.end} ends each document, none begins it.'
  )
  if name == 'tokenizer.model':
    note += ' Read it with sentencepiece: AutoTokenizer gives other tokens.'
  source = json.loads(came_with.get(CONFIG, b'{}'))
  settings = hf_format.exported_config(
    sizes, seq_len, tokenizer.end, note, source
  )
  files = {
    'config.json': settings,
    'generation_config.json': hf_format.generation_config(
      seq_len, tokenizer.end
    ),
  }
  if name and came_with.get(name) == content:
    kept = came_with.keys() & {*OF_TOKENIZER}
    return files | {each: came_with[each] for each in sorted(kept)}
  if name:
    files[name] = content
  if name.endswith('.json'):
    files['tokenizer_config.json'] = hf_format.tokenizer_config(
      seq_len, tokenizer.end_text
    )
  return files


def task_files(
  task: pathlib.Path, outdir: pathlib.Path, tokenizer: Tokenizer, seq_len: int
) -> dict[str, bytes]:
  """Returns a task for lm-eval, by name of the file: its YAML and questions.

  Its metric `acc` is the share that `python -m diloco.evaluate --task` prints
  as by sum; `acc_norm` divides by characters.

  Args:
    task: a task file; see `diloco/data/tasks.py`.
    outdir: where the files will lie; lm-eval wants to know it.

  Raises:
    FileNotFoundError: there is no such task file.
    ValueError: it is malformed, or other tools can not ask the model.
  """
  if tokenizer.exported[0] != 'tokenizer.json':
    raise ValueError(
      f'--task={task}: lm-eval reads a tokenizer.json, which there is not of '
      f'data.tokenizer={tokenizer.name!r}'
    )
  choice_rows(read_questions(task), tokenizer, seq_len, tokenizer.vocab)
  questions = f'{task.stem}.jsonl'
  settings = f"""\
# lm_eval --model hf --model_args pretrained={outdir} \\
#   --include_path {outdir} --tasks {task_name(task)}
task: {task_name(task)}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {json.dumps(str(outdir.resolve() / questions))}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ''
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
  return {f'{task.stem}.yaml': settings.encode(), questions: task.read_bytes()}


def task_name(task: pathlib.Path) -> str:
  """Returns what lm-eval calls a task file; none of its own is called so."""
  return 'diloco_' + re.sub(r'\W', '_', task.stem)
