"""Random JSON Schemas over all enforced keywords, from a seed; small enough that most outputs end."""

import random
import string
from typing import Any, TypeAlias

Json: TypeAlias = Any

_PATTERNS = ("^[a-z]{2,6}$", "^(ab|cd)+x?$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]*$", "^$", "[0-9]$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration")


def make(seed: int) -> Json:
    """Return the schema of a seed: an object, as tools and OpenAI's clients use them."""
    dice = random.Random(seed)
    maker = _Maker(dice)
    schema = maker.object(0)
    if maker.shared:
        schema["$defs"] = maker.shared
    return schema


class _Maker:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.shared: dict[str, Json] = {}

    def any(self, depth: int) -> Json:
        leaves = [self.string, self.number, self.integer, self.constants, self.literal]
        branches = [self.object, self.array, self.either, self.reference]
        kinds = leaves if depth > 2 else leaves + branches
        return self._dice.choice(kinds)(depth)

    def object(self, depth: int) -> Json:
        dice = self._dice
        names = [self._name() for _ in range(dice.randint(0, 4))]
        schema: Json = {
            "type": "object",
            "properties": {name: self.any(depth + 1) for name in names},
            "required": [name for name in dict.fromkeys(names) if dice.random() < 0.7],
        }
        kind = dice.random()
        if kind < 0.75 or not names:
            schema["additionalProperties"] = False
        elif kind < 0.8:
            schema["additionalProperties"] = {"type": "boolean"}
        if dice.random() < 0.3:
            schema |= {"title": "Thing", "description": "what it is for"}
        return schema

    def array(self, depth: int) -> Json:
        least = self._dice.randint(0, 2)
        schema: Json = {"type": "array", "items": self.any(depth + 1)}
        if least:
            schema["minItems"] = least
        schema["maxItems"] = least + self._dice.randint(0, 2)
        if self._dice.random() < 0.2:
            schema |= {"prefixItems": [self.any(depth + 1)], "maxItems": least + 1}
        return schema

    def string(self, _: int) -> Json:
        dice, kind = self._dice, self._dice.random()
        if kind < 0.3:
            return {"type": "string", "pattern": dice.choice(_PATTERNS)}
        if kind < 0.5:
            return {"type": "string", "format": dice.choice(_FORMATS)}
        least = dice.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 12)}

    def number(self, _: int) -> Json:
        low = self._dice.uniform(-1000, 1000)
        bound = self._dice.choice(["minimum", "exclusiveMinimum"])
        return {"type": "number", bound: round(low, 2), "maximum": round(low + 50.5, 3)}

    def integer(self, _: int) -> Json:
        low = self._dice.randint(-1000, 1000)
        schema: Json = {"type": "integer", "minimum": low}
        if self._dice.random() < 0.7:
            schema["exclusiveMaximum"] = low + self._dice.randint(8, 500)
        if self._dice.random() < 0.3:
            schema["multipleOf"] = self._dice.choice([2, 5, 7])
        return schema

    def literal(self, _: int) -> Json:
        return {"type": self._dice.choice(["boolean", "null", ["boolean", "null"], "integer"])}

    def constants(self, _: int) -> Json:
        values: list[Json] = [
            None,
            True,
            3,
            -1.5,
            "a",
            'quote " and \\',
            "größe\n",
            {"k": [1, "v"]},
            [],
        ]
        if self._dice.random() < 0.3:
            return {"const": self._dice.choice(values)}
        return {"enum": self._dice.sample(values, self._dice.randint(1, 4))}

    def either(self, depth: int) -> Json:
        return {"anyOf": [self.any(depth + 1) for _ in range(self._dice.randint(1, 3))]}

    def reference(self, depth: int) -> Json:
        name = self._dice.choice("PQR")
        if name not in self.shared:
            self.shared[name] = {}  # who refers to it while it is made would make it endless
            self.shared[name] = self.any(depth + 1)
        if self.shared[name] == {}:
            return {"type": "boolean"}
        return {"$ref": f"#/$defs/{name}"}

    def _name(self) -> str:
        letters = self._dice.choices(string.ascii_letters + "ä é_-", k=self._dice.randint(1, 6))
        return "".join(letters)
