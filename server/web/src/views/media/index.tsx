/** The media of trials, loaded with the first look at them: most pages show none. */

import { Lazy } from "../../parts";
import type { MediaProps } from "./common";

const load = () => import("./panels").then((module) => module.Panels);

export const Media = (props: MediaProps) => <Lazy load={load} with={props} quiet={props.quiet} />;
