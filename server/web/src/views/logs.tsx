/** The newest log lines, followed while they come. */

import { useEffect, useRef, useState } from "preact/hooks";

import { get } from "../api";
import type { Log as LogLine, Trial } from "../resources";
import { clock } from "../format";
import { useLoaded } from "../live";
import { Problem } from "../parts";

const LINES = 1000;

/** The level that our own processes write before a message; it stands in its column. */
const PREFIX = /^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) /;

export function Logs({ path, tick, trials }: { path: string; tick: number; trials: Trial[] }) {
  const [level, setLevel] = useState("");
  const [text, setText] = useState("");
  const [follow, setFollow] = useState(true);
  const box = useRef<HTMLPreElement>(null);
  const query = level === "" ? "" : `&level=${level}`;
  const lines = useLoaded(
    `${path} ${level}`,
    () => get<{ logs: LogLine[] }>(`${path}/logs?tail=${LINES}${query}`).then((answer) => answer.logs),
    tick,
  );
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.value, follow]);
  const found = (lines.value ?? []).filter((line) => line.text.toLowerCase().includes(text.toLowerCase()));
  return (
    <section>
      {lines.error && <Problem text={lines.error} />}
      <div class="choice">
        <input
          type="search"
          placeholder="part of a line"
          aria-label="search lines"
          value={text}
          onInput={(e) => setText(e.currentTarget.value)}
        />
        <select aria-label="least level" value={level} onChange={(e) => setLevel(e.currentTarget.value)}>
          <option value="">every line</option>
          {["INFO", "WARNING", "ERROR"].map((one) => (
            <option value={one} key={one}>
              {one.toLowerCase()} and above
            </option>
          ))}
        </select>
        <label>
          <input type="checkbox" checked={follow} onChange={(e) => setFollow(e.currentTarget.checked)} /> follow
        </label>
        {lines.value?.length === LINES && <span class="muted">the last {LINES} lines</span>}
      </div>
      <pre class="logs" ref={box} tabIndex={0} aria-label="log lines">
        {found.map((line) => (
          <Line key={line.id} line={line} several={trials.length > 1} />
        ))}
        {lines.value === null ? "Reading…" : found.length === 0 && "No line."}
      </pre>
    </section>
  );
}

function Line({ line, several }: { line: LogLine; several: boolean }) {
  const level = (line.level ?? "").toLowerCase();
  const source = line.rank === null ? line.stream : `rank ${line.rank}`;
  return (
    <span class={`line ${line.stream} ${level === "critical" ? "error" : level}`}>
      <time title={clock(line.time)}>{clock(line.time).slice(11)}</time>
      <i>
        {several && line.trial_id !== null ? `trial ${line.trial_id} ` : ""}
        {source}
      </i>
      <b>{level === "info" ? "" : level}</b>
      {line.text.replace(PREFIX, "")}
      {"\n"}
    </span>
  );
}
