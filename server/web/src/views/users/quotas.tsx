/** Quotas and requests for larger ones; loaded only where several users share the slots. */

import { useContext, useEffect, useState } from "preact/hooks";

import { Allowed, Caller } from "./access";
import { get, post } from "../../api";
import { Question } from "../../dialog";
import { number } from "../../format";
import { useLoaded } from "../../live";
import { Cell, Problem, Raw, Table, Time } from "../../parts";
import type { Quota, QuotaPage, QuotaRequest, QuotaRequestPage } from "../../resources";

const REQUEST_HEADS = ["user", "slots", "reason", "requested", "decision"];
/** Most requests in the table. */
const SHOWN = 20;

async function read(): Promise<{ quotas: Quota[]; requests: QuotaRequest[] }> {
  const [{ quotas }, { requests }] = await Promise.all([get<QuotaPage>("/quotas"), get<QuotaRequestPage>(`/quota-requests?limit=${SHOWN}`)]);
  return { quotas, requests };
}

export function Quotas({ tick }: { tick: unknown }) {
  const caller = useContext(Caller);
  const found = useLoaded("quotas", read);
  useEffect(found.reload, [tick]);
  if (found.value === null) return found.error ? <Problem text={found.error} /> : null;
  const { quotas, requests } = found.value;
  if (quotas.length === 0 && requests.length === 0) return null;
  const mine = quotas.find(({ group }) => group === `user:${caller?.user}`);
  const most = quotas.find(({ request_limit }) => request_limit !== null)?.request_limit ?? null;
  return (
    <section aria-label="quotas">
      <h2>
        Quotas <Raw path="/quotas" />
      </h2>
      <Table head={["group", "slots in use", "limit"].map((name) => <th key={name}>{name}</th>)}>
        {quotas.map((quota) => (
          <tr key={quota.group}>
            <Cell kind="name">
              {quota.group === "user:*" ? "each user without a quota" : quota.group} {quota.is_default && <small class="muted">default</small>}
            </Cell>
            <Cell name="slots in use" kind="figure">
              {number(quota.held_slots)}
            </Cell>
            <Cell name="limit" kind="figure">
              {number(quota.max_slots)}
            </Cell>
          </tr>
        ))}
      </Table>
      {mine && (
        <p>
          <Allowed>
            <NewRequest quota={mine} most={most} done={found.reload} />
          </Allowed>
        </p>
      )}
      {requests.length > 0 && (
        <>
          <h2>Requests for larger quotas</h2>
          <Table head={REQUEST_HEADS.map((name) => <th key={name}>{name}</th>)}>
            {requests.map((request) => (
              <Line key={request.id} request={request} done={found.reload} />
            ))}
          </Table>
        </>
      )}
    </section>
  );
}

function NewRequest({ quota, most, done }: { quota: Quota; most: number | null; done: () => void }) {
  const [open, setOpen] = useState(false);
  const [slots, setSlots] = useState("");
  const [reason, setReason] = useState("");
  const act = () => post("/quota-requests", { max_slots: Number(slots), reason }).then(done);
  return (
    <>
      <button type="button" onClick={() => (setSlots(""), setReason(""), setOpen(true))}>
        request a larger quota
      </button>
      {open && (
        <Question title="request a larger quota" deed="request" act={act} close={() => setOpen(false)}>
          <label class="field">
            Slots
            <input type="number" required min={quota.max_slots + 1} max={most ?? undefined} value={slots} onInput={(e) => setSlots(e.currentTarget.value)} />
          </label>
          <label class="field">
            Reason
            <input required maxLength={1000} value={reason} onInput={(e) => setReason(e.currentTarget.value)} />
          </label>
          <p class="muted">
            Your quota is {number(quota.max_slots)} slots. An administrator decides; a new request replaces your open one.
          </p>
        </Question>
      )}
    </>
  );
}

function Line({ request, done }: { request: QuotaRequest; done: () => void }) {
  return (
    <tr>
      <Cell kind="name">{request.user}</Cell>
      <Cell name="slots" kind="figure">
        {number(request.max_slots)}
      </Cell>
      <Cell name="reason">{request.reason}</Cell>
      <Cell name="requested" kind="figure">
        <Time at={request.created_at} />
      </Cell>
      <Cell name="decision">
        {request.state === "OPEN" ? (
          <Allowed role="admin">
            <Decision request={request} deed="approve" done={done} /> <Decision request={request} deed="decline" done={done} />
          </Allowed>
        ) : (
          <>
            {request.state.toLowerCase()} by {request.decided_by}
            {request.answer && <small class="muted"> {request.answer}</small>}
          </>
        )}
      </Cell>
    </tr>
  );
}

function Decision({ request, deed, done }: { request: QuotaRequest; deed: "approve" | "decline"; done: () => void }) {
  const [open, setOpen] = useState(false);
  const [reason, setReason] = useState("");
  const slots = number(request.max_slots);
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        {deed}
      </button>
      {open && (
        <Question
          title={`${deed} the request of ${request.user} for ${slots} slots?`}
          deed={deed}
          act={() => post(`/quota-requests/${request.id}/${deed}`, { reason }).then(done)}
          close={() => setOpen(false)}
        >
          <label class="field">
            Reason for the user, optional
            <input maxLength={1000} value={reason} onInput={(e) => setReason(e.currentTarget.value)} />
          </label>
        </Question>
      )}
    </>
  );
}
