"""A model that sees, for an emulated engine: a folder with a configuration, no weights.

The language is that of the emulated model, the vision tower BLIP-2's, which needs no torchvision:
each image is 32 tokens at the head of the prompt.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from trimtab.engine_bridge.vllm.emulated_model import ANSWER_TOKENS, model_folder

IMAGE_TOKENS = 32
PIXELS = 28
_IMAGE = "<image>"


def make_model(folder: Path) -> None:
    """Write the folder for vLLM's `--model`."""
    base = model_folder()
    text = json.loads((base / "config.json").read_text())
    del text["architectures"]
    image_id = ANSWER_TOKENS.stop
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    special = tokenizer["added_tokens"][0] | {"id": image_id, "content": _IMAGE}
    tokenizer["added_tokens"].append(special)
    tokenizer["model"]["vocab"][_IMAGE] = image_id
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2}
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "text_config": text | {"vocab_size": image_id + 1},
        "vision_config": tower
        | {"model_type": "blip_2_vision_model", "image_size": PIXELS, "patch_size": 14},
        "qformer_config": tower
        | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "vocab_size": 10},
        "num_query_tokens": IMAGE_TOKENS,
        "image_token_index": image_id,
        "dtype": "bfloat16",
    }
    pixels = {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": PIXELS, "width": PIXELS},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.loads((base / "tokenizer_config.json").read_text()),
        "preprocessor_config.json": pixels,
        "processor_config.json": {
            "processor_class": "Blip2Processor",
            "num_query_tokens": IMAGE_TOKENS,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def picture(colour: str) -> dict[str, Any]:
    """A part of a chat message that shows a plain picture."""
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (PIXELS, PIXELS), colour).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
