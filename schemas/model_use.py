"""ModelUse: what agents must know of a ModelDeployment that may come to their Mac, and nothing else of it."""

from schemas.meta import ApiModel, ModelPath, ObjectName


class ModelUse(ApiModel):
    """The value of `modeluse/<deployment>`, which the leading reconciler keeps."""

    deployment: ObjectName
    models: tuple[ModelPath, ...] = ()
    """Folders of its model, of the draft model, and of the models that it may fall back on."""
    split_models: tuple[ModelPath, ...] = ()
    """Those of them that may be split over a group."""
    is_split: bool = False
    """True if the commit of its hub model may be split over a group, too."""
    adapters: tuple[ModelPath, ...] = ()
    """Folders of its adapters."""
    priority: int = 0
    """Engines of a higher priority start first."""
    keeps_prompts: bool = False
    """True if its engines keep cached prompts on the disk."""
