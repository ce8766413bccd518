"""`fleetctl support-bundle`: what somebody who helps needs to see, without what is nobody's business."""
