"""The contents of a sentencepiece model: its pieces, and its text normalisation.

The file is a protocol buffer, sentencepiece_model.proto of the sentencepiece library. The library's own reader
requires exactly the protobuf version it was generated with (7.36.1 in sentencepiece 0.2.3), so the fields needed here
are declared again, and any version of protobuf reads them.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

BPE = 2  # model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # type of a piece

_MESSAGES = {
    "SentencePiece": (("piece", 1, "STRING", ""), ("score", 2, "FLOAT", "0"), ("type", 3, "INT32", "1")),
    "TrainerSpec": (
        ("model_type", 3, "INT32", "1"), ("byte_fallback", 35, "BOOL", "false"), ("unk_surface", 44, "STRING", " ⁇ "),
    ),
    "NormalizerSpec": (
        ("precompiled_charsmap", 2, "BYTES", ""), ("add_dummy_prefix", 3, "BOOL", "true"),
        ("remove_extra_whitespaces", 4, "BOOL", "true"), ("escape_whitespaces", 5, "BOOL", "true"),
    ),
    "ModelProto": (
        ("pieces", 1, "SentencePiece", None), ("trainer_spec", 2, "TrainerSpec", None),
        ("normalizer_spec", 3, "NormalizerSpec", None),
    ),
}  # fmt: skip
"""Name, number, type and default of fields, as in sentencepiece_model.proto; enums are numbers."""


def parse_pieces(content: bytes) -> Any:
    """The ModelProto in `content`, a file that the library has opened: it is not checked again."""
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind, default in fields:
            field = described.field.add(name=name, number=number, default_value=default)
            field.label = field.LABEL_REPEATED if name == "pieces" else field.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".pieces.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.ModelProto")).FromString(content)
