/** The registry: models, and the checkpoints that are their versions. */

import { useState } from "preact/hooks";

import { Allowed } from "../users/access";
import { get, post, put, remove } from "../../api";
import { Ask, Question } from "../../dialog";
import { bytes, number } from "../../format";
import { useLoaded } from "../../live";
import { Cell, Copy, Lazy, Problem, Raw, Table, Time } from "../../parts";
import type { Checkpoint, Model as Row, ModelVersion } from "../../resources";
import { address, modelAddress, trialAddress } from "../../route";
import { Files, Measured } from "../checkpoints";
import { readModels } from "./register";

const HEADS = ["model", "owner", "description", "versions", "latest version", "latest metrics", "added"];
const VERSION_HEADS = ["version", "checkpoint", "trial", "batch", "size", "validation", "notes", "registered", ""];

export function Models() {
  const list = useLoaded("/models", readModels);
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Loading…</p>;
  const shared = list.value.some((model) => model.owner !== null);
  return (
    <>
      {list.error && <Problem text={list.error} />}
      <header class="title">
        <h1>Models</h1>
        <div class="actions">
          <Allowed>
            <New done={list.reload} />
          </Allowed>
          <Raw path="/models" />
        </div>
      </header>
      {list.value.length === 0 ? (
        <div class="notice">
          No models yet. To register a checkpoint, use <b>Register</b> in the checkpoints of an experiment, or run{" "}
          <code>zerolab model register-version</code>. Registered checkpoints are not deleted by retention policies.
        </div>
      ) : (
        <Table head={HEADS.filter((name) => shared || name !== "owner").map((name) => <th key={name}>{name}</th>)}>
          {list.value.map((model) => (
            <Line key={model.name} model={model} shared={shared} />
          ))}
        </Table>
      )}
    </>
  );
}

function Line({ model, shared }: { model: Row; shared: boolean }) {
  const newest = model.versions.at(-1);
  return (
    <tr>
      <Cell kind="name">
        <a href={modelAddress(model.name)}>{model.name}</a>
      </Cell>
      {shared && <Cell name="owner">{model.owner}</Cell>}
      <Cell name="description">{model.description}</Cell>
      <Cell name="versions" kind="figure">
        {number(model.versions.length)}
      </Cell>
      <Cell name="latest version" kind="figure">
        {newest ? (
          <>
            {newest.version} <small class="muted"><Time at={newest.created_at} /></small>
          </>
        ) : (
          "–"
        )}
      </Cell>
      <Cell name="latest metrics" kind="hparams">
        <Measured metrics={newest?.metrics ?? null} />
      </Cell>
      <Cell name="added" kind="figure">
        <Time at={model.created_at} />
      </Cell>
    </tr>
  );
}

function New({ done }: { done: () => void }) {
  const [open, setOpen] = useState(false);
  const [name, setName] = useState("");
  const [description, setDescription] = useState("");
  const act = () => post("/models", { name, description }).then(done);
  return (
    <>
      <button type="button" onClick={() => (setName(""), setDescription(""), setOpen(true))}>
        new model
      </button>
      {open && (
        <Question title="new model" deed="add" act={act} close={() => setOpen(false)}>
          <label class="field">
            Name
            <input required value={name} onInput={(e) => setName(e.currentTarget.value.trim())} />
          </label>
          <label class="field">
            Description
            <input value={description} onInput={(e) => setDescription(e.currentTarget.value)} />
          </label>
        </Question>
      )}
    </>
  );
}

const difference = () => import("./difference").then((module) => module.Difference);

export function Model({ name }: { name: string }) {
  const [chosen, setChosen] = useState<number[]>([]);
  const toggle = (version: number) => setChosen(chosen.includes(version) ? chosen.filter((one) => one !== version) : [...chosen.slice(-1), version]);
  const path = `/models/${name}`;
  const found = useLoaded(path, () => get<{ model: Row }>(path).then((answer) => answer.model));
  const model = found.value;
  if (model === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  const several = model.versions.length > 1;
  const compared = model.versions.filter(({ version }) => chosen.includes(version));
  return (
    <>
      {found.error && <Problem text={found.error} />}
      <header class="title">
        <h1>
          <small>
            <a href="#/models">model</a>
          </small>{" "}
          {model.name}
        </h1>
        <div class="actions">
          <Allowed owner={model.owner}>
            <Ask
              act={() => remove(path).then(() => window.location.replace("#/models"))}
              final
              title={`remove model ${name}?`}
              ask="The model and its versions are removed from the registry. Checkpoints are then kept by the policy of their experiments."
            >
              remove
            </Ask>
          </Allowed>
          <Raw path={path} />
        </div>
      </header>
      {model.description && <p class="muted description">{model.description}</p>}
      {model.versions.length === 0 ? (
        <p class="muted">
          No versions yet: <code>zerolab model register-version {name} UUID</code>, or use <b>Register</b> in the checkpoints of an experiment.
        </p>
      ) : (
        <>
        <Table head={[...(several ? [<th key="selected" aria-label="selected" />] : []), ...VERSION_HEADS.map((head) => <th key={head} aria-label={head || "actions"}>{head}</th>)]}>
          {[...model.versions].reverse().map((version) => (
            <VersionLine key={version.version} model={model} version={version} done={found.reload} chosen={several ? chosen.includes(version.version) : null} toggle={toggle} />
          ))}
        </Table>
        {compared.length === 2 ? (
          <Lazy key={chosen.join()} load={difference} with={{ versions: compared }} />
        ) : (
          several && <p class="muted">Select two versions to compare them.</p>
        )}
        </>
      )}
    </>
  );
}

interface VersionProps {
  model: Row;
  version: ModelVersion;
  done: () => void;
  /** Null where there is nothing to compare with. */
  chosen: boolean | null;
  toggle: (version: number) => void;
}

function VersionLine({ model, version: v, done, chosen, toggle }: VersionProps) {
  const [open, setOpen] = useState(false);
  const act = () => remove(`/models/${model.name}/versions/${v.version}`).then(done);
  return (
    <tr>
      {chosen !== null && (
        <Cell>
          <input type="checkbox" checked={chosen} aria-label={`compare version ${v.version}`} onChange={() => toggle(v.version)} />
        </Cell>
      )}
      <Cell name="version" kind="figure">
        {v.version}{" "}
        {v.aliases.map((alias) => (
          <>
            <span key={alias} class="badge verbatim">{alias}</span>{" "}
          </>
        ))}
      </Cell>
      <Cell>
        <details onToggle={(e) => setOpen(e.currentTarget.open)}>
          <summary>
            <code title={v.checkpoint}>{v.checkpoint.slice(0, 8)}</code>
          </summary>
          <p class="path">
            {v.checkpoint} <Copy text={v.checkpoint} />
          </p>
          <p class="path">zerolab checkpoint download {v.checkpoint} DIRECTORY</p>
          {open && <VersionFiles uuid={v.checkpoint} />}
        </details>
      </Cell>
      <Cell name="trial" kind="figure">
        <a href={trialAddress(v.trial_id, "checkpoints")}>{v.trial_id}</a> of <a href={address(v.experiment_id)}>experiment {v.experiment_id}</a>
      </Cell>
      <Cell name="batch" kind="figure">
        {number(v.steps_completed)}
      </Cell>
      <Cell name="size" kind="figure">
        {bytes(v.size_bytes)}
      </Cell>
      <Cell name="validation" kind="hparams">
        <Measured metrics={v.metrics} />
      </Cell>
      <Cell name="notes">{v.notes}</Cell>
      <Cell name="registered" kind="figure">
        <Time at={v.created_at} />
      </Cell>
      <Cell kind="acts">
        <Allowed owner={model.owner}>
          <Aliases model={model.name} version={v} done={done} />{" "}
          <Ask act={act} title={`remove version ${v.version} of ${model.name}?`} ask="The checkpoint is then kept by the policy of its experiment. The version number is not reused.">
            remove
          </Ask>
        </Allowed>
      </Cell>
    </tr>
  );
}

function Aliases({ model, version: v, done }: { model: string; version: ModelVersion; done: () => void }) {
  const [open, setOpen] = useState(false);
  const [text, setText] = useState("");
  const act = () => put(`/models/${model}/versions/${v.version}/aliases`, { aliases: text.split(/\s+/).filter(Boolean) }).then(done);
  return (
    <>
      <button type="button" onClick={() => (setText(v.aliases.join(" ")), setOpen(true))}>
        aliases
      </button>
      {open && (
        <Question title={`aliases of version ${v.version}`} deed="save" act={act} close={() => setOpen(false)}>
          <p>An alias, such as production, names one version of the model. An alias of another version moves here.</p>
          <label class="field">
            Aliases, separated by spaces
            <input value={text} onInput={(e) => setText(e.currentTarget.value)} />
          </label>
        </Question>
      )}
    </>
  );
}

function VersionFiles({ uuid }: { uuid: string }) {
  const found = useLoaded(uuid, () => get<{ checkpoint: Checkpoint }>(`/checkpoints/${uuid}`).then(({ checkpoint }) => checkpoint));
  if (found.value === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  return <Files checkpoint={found.value} />;
}
