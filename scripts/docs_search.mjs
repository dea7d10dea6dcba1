// Ask the search of the built site, in its own worker, and fail if a query does not find its page first.
//
//     node scripts/docs_search.mjs .site              the queries below
//     node scripts/docs_search.mjs .site "kept ids"   shows what a query finds
//
// The worker's messages: 0 takes the index, 2 a query; the last answer to a query has its results, best page first.
import fs from "node:fs"

const EXPECTED = {
  "logits_budget": "memory/",
  "qlora": "guides/sft/",
  "lora": "guides/sft/",
  "install": "getting-started/",
  "sft": "guides/sft/",
  "dpo": "guides/preferences/",
  "grpo": "guides/grpo/",
  "distillation": "guides/distillation/",
  "memory": "memory/",
  "fsdp": "distributed/",
  "trl": "trainers/",
  "kept ids": "guides/grpo/",
  "contributing": "contributing/",
  "custom loss": "writing-a-loss/",
  "write a loss": "writing-a-loss/",
  "packing": "guides/sft/",
  "evaluation": "evaluation/",
  "eval_loss": "evaluation/",
  "oom": "troubleshooting/",
  "out of memory": "troubleshooting/",
  "swapped": "troubleshooting/",
  "nan": "troubleshooting/",
  "migration": "compare/",
}

const [site, ...asked] = process.argv.slice(2)
let handler
let answer
globalThis.self = globalThis
globalThis.addEventListener = (kind, listener) => {
  if (kind === "message") handler = listener
}
globalThis.postMessage = message => {
  answer = message
}
const workers = `${site}/assets/javascripts/workers`
const worker = fs.readdirSync(workers).find(file => /^search\..*\.js$/.test(file))
new Function(fs.readFileSync(`${workers}/${worker}`, "utf8"))()
const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"))
await handler({data: {type: 0, data: {...index, options: {suggest: false}}}})

const pages = async query => {
  await handler({data: {type: 2, data: query}})
  return answer.data.items.map(([best]) => best.location)
}

let failed = 0
for (const query of asked.length ? asked : Object.keys(EXPECTED)) {
  // The box sends what is typed, and a wildcard behind it.
  for (const typed of [query, `${query}*`]) {
    const [first, ...others] = await pages(typed)
    if (asked.length) console.log(typed, [first, ...others.slice(0, 4)])
    else if (first?.split("#")[0] !== EXPECTED[query]) {
      console.error(`search "${typed}": expected ${EXPECTED[query]} first, got ${[first, ...others.slice(0, 2)]}`)
      failed += 1
    }
  }
}
process.exitCode = failed ? 1 : 0
