"""The judgement of `fleetctl doctor`: checks over an observation of a fleet, and what they find. Pure but for one probe."""
