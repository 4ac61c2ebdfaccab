/** The newest log lines, followed while they come. */

import { useEffect, useRef, useState } from "preact/hooks";

import { get, type LogLine } from "../api";
import { useLoaded } from "../live";
import { Problem } from "../parts";

export function Logs({ path, tick }: { path: string; tick: number }) {
  const [level, setLevel] = useState("");
  const [follow, setFollow] = useState(true);
  const box = useRef<HTMLPreElement>(null);
  const query = level === "" ? "" : `&level=${level}`;
  const lines = useLoaded(`${path} ${level}`, () =>
    get<{ logs: LogLine[] }>(`${path}/logs?tail=1000${query}`).then((r) => r.logs),
  );
  const [seen, setSeen] = useState(tick);
  if (seen !== tick) {
    setSeen(tick);
    lines.reload();
  }
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.value, follow]);
  if (lines.error) return <Problem text={lines.error} />;
  return (
    <section>
      <div class="choice">
        <select aria-label="level" value={level} onChange={(e) => setLevel(e.currentTarget.value)}>
          {["", "DEBUG", "INFO", "WARNING", "ERROR"].map((l) => (
            <option value={l} key={l}>
              {l || "every level"}
            </option>
          ))}
        </select>
        <label>
          <input type="checkbox" checked={follow} onChange={(e) => setFollow(e.currentTarget.checked)} /> follow
        </label>
      </div>
      <pre class="logs" ref={box} tabIndex={0} aria-label="log lines">
        {(lines.value ?? []).map((line) => (
          <span class={`line ${line.stream} ${(line.level ?? "").toLowerCase()}`} key={line.id}>
            <time>{line.time.slice(11, 19)}</time>
            <i>{line.rank === null ? line.stream : `rank ${line.rank}`}</i>
            {line.text}
            {"\n"}
          </span>
        ))}
        {lines.value?.length === 0 && "No line yet."}
      </pre>
    </section>
  );
}
