/** What one trial has reported under one name, at the step of the slider or the last one before. */

import { useMemo, useState } from "preact/hooks";

import { text } from "../../api";
import { bytes, number } from "../../format";
import { useLoaded } from "../../live";
import { Cell, Problem, Table, Time } from "../../parts";
import type { Media } from "../../resources";
import type { Series } from "./common";
import { Histogram } from "./histogram";

interface Props {
  type: Media["type"];
  series: Series;
  step: number;
  /** Other trials are shown beside this one. */
  several: boolean;
}

/** Index behind the last medium whose step is at most `step`; the media are sorted by step. */
function behind(media: Media[], step: number): number {
  let low = 0;
  let high = media.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (media[middle]!.step <= step) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The media of the last step that is at most `step`. */
export function shownAt(media: Media[], step: number): Media[] {
  const end = behind(media, step);
  if (end === 0) return [];
  return media.slice(behind(media, media[end - 1]!.step - 1), end);
}

export function Contents({ type, series, step, several }: Props) {
  const { trial, media } = series;
  if (type === "file") return <Files trial={trial} media={media} />;
  const shown = shownAt(media, step);
  const first = shown[0];
  if (first === undefined) return <p class="muted">None up to batch {number(step)}.</p>;
  return (
    <>
      {first.step !== step && <small class="muted">batch {number(first.step)}</small>}
      {type === "image" && <Images trial={trial} media={shown} several={several} />}
      {type === "audio" && shown.map((one) => <Sound key={one.position} trial={trial} medium={one} />)}
      {type === "text" && shown.map((one) => <Words key={one.position} trial={trial} medium={one} />)}
      {type === "table" && shown.map((one) => <Rows key={one.position} trial={trial} medium={one} />)}
      {type === "histogram" && <Histogram media={media} shown={first} />}
    </>
  );
}

export const source = (trial: number, { digest }: Media): string => `/api/v1/trials/${trial}/media/${digest}`;

const caption = ({ metadata }: Media): string => (typeof metadata.caption === "string" ? metadata.caption : "");

/** Most images of a step that are shown at first, in one trial and in each of several. */
const MOST_IMAGES = [60, 12] as const;

function Images({ trial, media, several }: { trial: number; media: Media[]; several: boolean }) {
  const [everything, setEverything] = useState(false);
  const most = MOST_IMAGES[several ? 1 : 0];
  return (
    <>
      <ul class="images">
        {(everything ? media : media.slice(0, most)).map((one) => (
          <li key={one.position}>
            <a href={source(trial, one)} target="_blank" rel="noreferrer">
              <Picture url={source(trial, one)} medium={one} />
            </a>
            {caption(one) && <small>{caption(one)}</small>}
          </li>
        ))}
      </ul>
      {media.length > most && (
        <button type="button" onClick={() => setEverything(!everything)}>
          {everything ? `Show the first ${most}` : `Show all ${number(media.length)}`}
        </button>
      )}
    </>
  );
}

/** Wait before an image that its run has not uploaded yet is asked for again. */
const AGAIN_MS = 2000;
/** Width of images that are enlarged, because they have fewer pixels. */
const ENLARGED = 96;

/** An image. The element stays from step to step, so the browser drops requests of steps passed over. */
function Picture({ url, medium }: { url: string; medium: Media }) {
  const [failed, setFailed] = useState({ url, tries: 0 });
  const tries = failed.url === url ? failed.tries : 0;
  const again = () => tries < 5 && window.setTimeout(() => setFailed({ url, tries: tries + 1 }), AGAIN_MS);
  const [width, height] = [Number(medium.metadata.width), Number(medium.metadata.height)];
  const small = width <= 64;
  const scale = small ? ENLARGED / width : 1;
  return (
    <img
      src={tries > 0 ? `${url}?${tries}` : url}
      class={small ? "small" : ""}
      loading="lazy"
      alt={caption(medium) || `${medium.name} at batch ${medium.step}`}
      width={scale * width || undefined}
      height={Math.round(scale * height) || undefined}
      onError={again}
    />
  );
}

function Sound({ trial, medium }: { trial: number; medium: Media }) {
  return (
    <p>
      <audio controls preload="none" src={source(trial, medium)} aria-label={`${medium.name} at batch ${medium.step}`} /> {caption(medium)}
    </p>
  );
}

/** Most characters of a text that are shown. */
const MOST_TEXT = 100_000;

function useContent(trial: number, medium: Media) {
  const path = `/trials/${trial}/media/${medium.digest}`;
  return useLoaded(path, () => text(path));
}

function Words({ trial, medium }: { trial: number; medium: Media }) {
  const found = useContent(trial, medium);
  if (found.value === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  return <pre class="config">{found.value.slice(0, MOST_TEXT)}</pre>;
}

interface Sheet {
  columns: string[];
  rows: unknown[][];
}

/** Most rows of a table that are shown. */
const MOST_ROWS = 200;

function Rows({ trial, medium }: { trial: number; medium: Media }) {
  const found = useContent(trial, medium);
  const [sorted, setSorted] = useState<[column: number, down: boolean] | null>(null);
  const [filter, setFilter] = useState("");
  const sheet = useMemo(() => (found.value === null ? null : (JSON.parse(found.value) as Sheet)), [found.value]);
  const rows = useMemo(() => arranged(sheet?.rows ?? [], sorted, filter), [sheet, sorted, filter]);
  if (sheet === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  const sort = (column: number) => setSorted(sorted?.[0] === column ? [column, !sorted[1]] : [column, false]);
  return (
    <>
      <div class="choice">
        <input type="search" aria-label={`filter ${medium.name}`} placeholder="Filter rows" value={filter} onInput={(e) => setFilter(e.currentTarget.value)} />
        <span class="muted">
          {rows.length > MOST_ROWS ? `first ${MOST_ROWS} of ` : ""}
          {number(rows.length)} rows
        </span>
        <a href={source(trial, medium)} download={medium.file_name}>
          download
        </a>
      </div>
      <Table
        head={sheet.columns.map((name, column) => (
          <th key={column} class="verbatim" aria-sort={sorted?.[0] === column ? (sorted[1] ? "descending" : "ascending") : undefined}>
            <button type="button" onClick={() => sort(column)}>
              {name}
            </button>
          </th>
        ))}
      >
        {rows.slice(0, MOST_ROWS).map((row, at) => (
          <tr key={at}>
            {row.map((value, column) => (
              <Cell key={column} name={sheet.columns[column]} kind={typeof value === "number" ? "figure" : undefined}>
                {typeof value === "number" ? number(value) : String(value ?? "")}
              </Cell>
            ))}
          </tr>
        ))}
      </Table>
    </>
  );
}

/** Rows with the text of the filter, in the order of a column: numbers by value, all else by letters. */
export function arranged(rows: unknown[][], sorted: [number, boolean] | null, filter: string): unknown[][] {
  const words = filter.toLowerCase();
  const kept = words === "" ? rows : rows.filter((row) => row.some((value) => String(value ?? "").toLowerCase().includes(words)));
  if (sorted === null) return kept;
  const [column, down] = sorted;
  const order = (a: unknown, b: unknown) => (typeof a === "number" && typeof b === "number" ? a - b : String(a ?? "").localeCompare(String(b ?? "")));
  return [...kept].sort((a, b) => (down ? -1 : 1) * order(a[column], b[column]));
}

function Files({ trial, media }: { trial: number; media: Media[] }) {
  return (
    <Table head={["file", "batch", "size", "reported"].map((name) => <th key={name}>{name}</th>)}>
      {[...media].reverse().slice(0, MOST_ROWS).map((one) => (
        <tr key={`${one.step} ${one.position}`}>
          <Cell name="file">
            <a href={source(trial, one)} download={one.file_name}>
              {one.file_name}
            </a>
          </Cell>
          <Cell name="batch" kind="figure">
            {number(one.step)}
          </Cell>
          <Cell name="size" kind="figure">
            {bytes(one.size)}
          </Cell>
          <Cell name="reported">
            <Time at={one.time} />
          </Cell>
        </tr>
      ))}
    </Table>
  );
}
