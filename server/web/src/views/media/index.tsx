/** The media of trials, loaded with the first look at them: most pages show none. */

import type { FunctionComponent } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Problem } from "../../parts";
import type { MediaProps } from "./common";

export function Media(props: MediaProps) {
  const [View, setView] = useState<FunctionComponent<MediaProps> | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    import("./panels").then(
      (loaded) => setView(() => loaded.Panels),
      () => setProblem("The view could not be loaded; reload the page."),
    );
  }, []);
  if (View !== null) return <View {...props} />;
  if (problem) return <Problem text={problem} />;
  return props.quiet ? null : <p class="muted">Loading…</p>;
}
