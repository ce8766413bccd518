/** What each screen shows of the fleet's state: the page asks the server for these views, columns and rows alone. */

const MAC_STATE = "state,isCordoned,isDraining";
const MAC_MEMORY = "memoryBytes,allocatableBytes,promisedBytes,weightsBytes,kvBytes";
const MAC_CARD = `macs:${MAC_STATE},${MAC_MEMORY},chip,models,site`;

/** Views of the screens without a name in their path. */
const LISTS = {
  "": [MAC_CARD, "models", "conditions::isProblem=true", "events"],
  map: [MAC_CARD, "groups", "figures"],
  macs: [`macs:${MAC_STATE},${MAC_MEMORY},reason,chip,models,site,agentVersion`],
  models: ["models"],
  groups: ["groups"],
  events: ["events"],
  add: ["macs:state,isCordoned,isDraining,chip,memoryBytes,agentVersion"],
  logs: ["macs:state", "replicas:deployment", "gateways:url"],
  whatif: [`macs:state,${MAC_MEMORY}`, "models"],
};
/** Views of the pages of one object. */
const DETAILS = {
  macs: (name) => [`macs::name=${name}`, "replicas", `conditions::object=${name}`, "events", `figures::name=${name}`],
  models: (name) => [`models::name=${name}`, `replicas::deployment=${name}`, `conditions::object=${name}`, "events"],
  groups: (name) => [`groups::name=${name}`, `macs:${MAC_STATE}`, `conditions::object=${name}`, "events", "replicas"],
  replicas: (name) => [`replicas::name=${name}`, `conditions::object=${name}`, "events"],
};

/** @returns {string[]} the selections of a screen, as `GET /api/v1/stream?view=` takes them */
export function selectionsOf(screen, name) {
  const found = name === undefined ? LISTS[screen] : DETAILS[screen]?.(name);
  return found ?? ["gateways:url"]; // the frame of every screen has the summary, which comes with any view
}
