/** The newest log lines, followed while they come. */

import { useEffect, useRef, useState } from "preact/hooks";

import { get } from "../api";
import { clock, number } from "../format";
import { useLoaded } from "../live";
import { Now } from "../dialog";
import { Problem, save, Select } from "../parts";
import type { Experiment, Log as LogLine, LogPage } from "../resources";
import { useChoice } from "../route";

const LINES = 1000;
const MORE_LINES = 10_000;
const MOST_SAVED = 500_000;

/** The level that our own processes write before a message; it stands in its column. */
const PREFIX = /^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) /;

/** What a terminal would take as colours and movements. */
// eslint-disable-next-line no-control-regex
const ESCAPES = /\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])/g;

const LEVELS: [string, string][] = [
  ["", "All levels"],
  ...["INFO", "WARNING", "ERROR"].map((one): [string, string] => [one, `${one} and above`]),
];

/** The time that an agent writes before its messages; the line's own time is shown. */
const AGENT_TIME = /^\d\d:\d\d:\d\dZ /;

const plain = (line: LogLine): string => {
  const text = line.text.replace(ESCAPES, "");
  return line.stream === "agent" ? text.replace(AGENT_TIME, "") : text.replace(PREFIX, "");
};
const origin = (line: LogLine): string => (line.rank === null ? line.stream : `rank ${line.rank}`);
const source = (line: LogLine, hosts: boolean): string => (hosts && line.host ? `${line.host} ${origin(line)}` : origin(line));

/** True if lines come from several hosts. */
const haveHosts = (lines: LogLine[]): boolean => new Set(lines.map((line) => line.host).filter(Boolean)).size > 1;

interface LogsProps {
  /** Whose log: of an experiment, or of a trial. */
  path: string;
  tick: number;
  /** Ranks of a trial. */
  ranks: number;
  /** Whether lines tell their trial. */
  several: boolean;
}

export function Logs({ path, tick, ranks, several }: LogsProps) {
  const [level, setLevel] = useChoice("level");
  const [rank, setRank] = useChoice("rank");
  const [text, setText] = useChoice("find");
  const [follow, setFollow] = useState(true);
  const [most, setMost] = useState(LINES);
  const box = useRef<HTMLPreElement>(null);
  const query = `${level && `&level=${level}`}${rank && `&rank=${rank}`}`;
  const lines = useLoaded(
    `${path} ${query}`,
    () => get<LogPage>(`${path}/logs?tail=${most}${query}`).then((answer) => answer.logs),
    `${tick} ${most}`,
  );
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.value, follow]);
  const found = (lines.value ?? []).filter((line) => line.text.toLowerCase().includes(text.toLowerCase()));
  const full = lines.value !== null && lines.value.length >= most;
  const hosts = haveHosts(lines.value ?? []);
  return (
    <section>
      {lines.error && <Problem text={lines.error} />}
      <div class="choice">
        <input
          type="search"
          placeholder="Search logs"
          aria-label="search logs"
          value={text}
          onInput={(e) => setText(e.currentTarget.value)}
        />
        <Select name="minimum level" value={level} options={LEVELS} choose={setLevel} />
        <Select name="rank" value={rank} options={rankOptions(ranks, rank)} choose={setRank} />
        <label>
          <input type="checkbox" checked={follow} onChange={(e) => setFollow(e.currentTarget.checked)} /> Follow
        </label>
        <Download path={path} query={query} />
        {full && <span class="muted">Last {number(most)} lines</span>}
        {full && most < MORE_LINES && (
          <button type="button" onClick={() => setMost(MORE_LINES)}>
            Load older lines
          </button>
        )}
      </div>
      <pre class="logs" ref={box} tabIndex={0} aria-label="log lines">
        {found.map((line) => (
          <Line key={line.id} line={line} several={several} hosts={hosts} />
        ))}
        {lines.value === null ? "Loading…" : found.length === 0 && "No log lines."}
      </pre>
    </section>
  );
}

/** Ranks of each trial, as the configuration says. */
export function slots(row: Experiment): number {
  const resources = row.config.resources as { slots_per_trial?: number } | undefined;
  return resources?.slots_per_trial ?? 1;
}

function rankOptions(ranks: number, chosen: string): [string, string][] {
  const count = Math.max(ranks, Number(chosen) + 1);
  return [["", "All ranks"], ...Array.from({ length: count }, (_, rank): [string, string] => [String(rank), `Rank ${rank}`])];
}

/** Hands every line that the filters of the server let pass to the browser as a file. */
function Download({ path, query }: { path: string; query: string }) {
  const [read, setRead] = useState<number | null>(null);
  const download = async () => {
    const rows: LogLine[] = [];
    let after: number | null = 0;
    while (after !== null && rows.length < MOST_SAVED) {
      setRead(rows.length);
      const page: LogPage = await get(`${path}/logs?limit=1000&after=${after}${query}`);
      rows.push(...page.logs);
      after = page.next_after;
    }
    const cut = after === null ? "" : `the first ${MOST_SAVED} lines only\n`;
    const hosts = haveHosts(rows);
    const asText = (line: LogLine) => [clock(line.time), line.trial_id ?? "-", source(line, hosts), line.text].join("\t");
    save(`${path.slice(1).replace("s/", "-")}.log`, `${rows.map(asText).join("\n")}\n${cut}`);
  };
  return (
    <Now busy={read !== null} act={() => download().finally(() => setRead(null))}>
      {read === null ? "download" : `${number(read)} lines…`}
    </Now>
  );
}

function Line({ line, several, hosts }: { line: LogLine; several: boolean; hosts: boolean }) {
  const level = (line.level ?? "").toLowerCase();
  return (
    <span class={`line ${level === "critical" ? "error" : level}`}>
      <time title={clock(line.time)}>{clock(line.time).slice(11)}</time>
      <i>
        {several && line.trial_id !== null ? `trial ${line.trial_id} ` : ""}
        {source(line, hosts)}
      </i>
      <b>{level === "info" ? "" : level}</b>
      {plain(line)}
      {"\n"}
    </span>
  );
}
