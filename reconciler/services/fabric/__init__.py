"""Regular checks of the cables of ShardGroups: carries out what `reconciler.groups.fabric_checks` decides."""
