"""A tokenizer for the tiny model: the letters its engine's stop strings know (``tiny_model.PIECES``), the longest piece first."""

import tiny_model as tiny

_IDS = {piece.decode(): i for i, piece in enumerate(tiny.PIECES)}


class LetterCodec:
    stop_ids = (tiny.STOP,)

    def encode(self, text):
        ids = []
        while text:
            size = 2 if text[:2] in _IDS else 1
            ids.append(_IDS[text[:size]])
            text = text[size:]
        return ids

    def decode(self, ids):
        return b"".join(tiny.PIECES[i] for i in ids).decode()
