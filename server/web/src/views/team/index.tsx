/** Sharing in a team: links, saved views, comments and groups of experiments; loaded on demand. */

export { Comments } from "./comments";
export { Groups } from "./groups";
export { Opened, ShareButton } from "./share";
export { Views } from "./views";
