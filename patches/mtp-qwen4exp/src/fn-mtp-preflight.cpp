#include "fn-mtp-preflight.h"

#include "gguf.h"
#include "ggml-cpp.h"
#include "json.h"
#include "log.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr const char * FN_ARCH = "qwen4exp";

// the tensors of the MTP block, without "blk.N." and ".weight"
const std::vector<std::string> FN_BLOCK_NAMES = {
    "hc_attn_norm", "hc_attn_down", "hc_attn_up", "hc_attn_inject",
    "hc_ffn_norm",  "hc_ffn_down",  "hc_ffn_up",  "hc_ffn_inject",
    "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm",
    "indexer.q_proj", "indexer.k_proj", "indexer.q_norm", "indexer.k_norm",
    "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
    "ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
    "nextn.eh_proj", "nextn.enorm", "nextn.hnorm",
    "nextn.hc_head_norm", "nextn.hc_head_down", "nextn.hc_head_up",
};

struct fn_header {
    gguf_context_ptr gguf;

    // name -> ne[1]; of the file given and, for a split set, of its other shards
    std::map<std::string, int64_t> tensors;

    std::string arch() const {
        const int64_t id = gguf_find_key(gguf.get(), "general.architecture");
        return id >= 0 && gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf.get(), id) : "";
    }

    // -1 if absent or not a number
    int64_t num(const std::string & key) const {
        const int64_t id = gguf_find_key(gguf.get(), key.c_str());
        if (id < 0) {
            return -1;
        }
        switch (gguf_get_kv_type(gguf.get(), id)) {
            case GGUF_TYPE_UINT16: return gguf_get_val_u16(gguf.get(), id);
            case GGUF_TYPE_UINT32: return gguf_get_val_u32(gguf.get(), id);
            case GGUF_TYPE_INT32:  return gguf_get_val_i32(gguf.get(), id);
            case GGUF_TYPE_UINT64: return gguf_get_val_u64(gguf.get(), id);
            default:               return -1;
        }
    }

    int64_t num_arch(const char * key) const { return num(std::string(FN_ARCH) + "." + key); }

    int64_t n_nextn() const { return std::max<int64_t>(0, num_arch("nextn_predict_layers")); }
    int64_t n_trunk() const { return num_arch("block_count") - n_nextn(); }

    int64_t tokens_id() const {
        const int64_t id = gguf_find_key(gguf.get(), "tokenizer.ggml.tokens");
        return id >= 0 && gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_ARRAY ? id : -1;
    }
    int64_t n_vocab() const { return tokens_id() < 0 ? -1 : (int64_t) gguf_get_arr_n(gguf.get(), tokens_id()); }
};

struct fn_refusal {
    common_json reasons = common_json::array();

    std::string summary; // all messages, for people

    void add(const char * id, const std::string & message, const std::string & target = "", const std::string & head = "") {
        summary += (summary.empty() ? "" : "; ") + message;
        if (!target.empty() && !head.empty()) {
            summary += " (target " + target + ", head " + head + ")";
        }
        reasons.push_back(common_json{ { "id", id }, { "message", message }, { "target", target }, { "head", head } });
    }

    void add_num(const char * id, const std::string & what, int64_t target, int64_t head) {
        if (target != head) {
            add(id, what + " differs", std::to_string(target), std::to_string(head));
        }
    }
};

std::optional<fn_header> fn_read_header(const std::string & path) {
    fn_header res;

    // "<prefix>-00001-of-00004.gguf": the other shards hold further tensors
    std::vector<std::string> paths = { path };
    std::smatch m;
    if (std::regex_match(path, m, std::regex("(.*)-00001-of-(\\d{5})\\.gguf"))) {
        const int n = std::stoi(m[2]);
        for (int i = 2; i <= n; ++i) {
            char no[16];
            snprintf(no, sizeof(no), "%05d", i);
            paths.push_back(m[1].str() + "-" + no + "-of-" + m[2].str() + ".gguf");
        }
    }

    for (const auto & p : paths) {
        ggml_context * meta = nullptr;
        gguf_context_ptr g(gguf_init_from_file(p.c_str(), { /*no_alloc*/ true, &meta }));
        ggml_context_ptr meta_owner(meta);
        if (!g) {
            return std::nullopt;
        }
        for (ggml_tensor * t = ggml_get_first_tensor(meta); t; t = ggml_get_next_tensor(meta, t)) {
            res.tensors[t->name] = t->ne[1];
        }
        if (!res.gguf) {
            res.gguf = std::move(g);
        }
    }

    return res;
}

std::string fn_join(const std::vector<std::string> & names) {
    std::string res;
    for (size_t i = 0; i < names.size() && i < 6; ++i) {
        res += (i ? ", " : "") + names[i];
    }
    if (names.size() > 6) {
        res += " and " + std::to_string(names.size() - 6) + " more";
    }
    return res;
}

void fn_check_vocab(const fn_header & target, const fn_header & head, fn_refusal & out) {
    const int64_t nt = target.n_vocab();
    const int64_t nh = head.n_vocab();

    if (nt != nh) {
        out.add_num("vocabulary", "number of tokens", nt, nh);
        return;
    }
    for (int64_t i = 0; i < nt; ++i) {
        const std::string a = gguf_get_arr_str(target.gguf.get(), target.tokens_id(), i);
        const std::string b = gguf_get_arr_str(head.gguf.get(),   head.tokens_id(),   i);
        if (a != b) {
            out.add("vocabulary", "token " + std::to_string(i) + " differs", a, b);
            return;
        }
    }
    for (const char * name : { "token_embd.weight", "output.weight" }) {
        const auto it = head.tensors.find(name);
        if (it != head.tensors.end() && it->second != nt) {
            out.add("vocabulary", std::string(name) + " has another number of rows than the target has tokens",
                    std::to_string(nt), std::to_string(it->second));
        }
    }
}

void fn_check_tensors(const fn_header & head, fn_refusal & out) {
    const std::string blk = "blk." + std::to_string(head.n_trunk()) + ".";

    std::set<std::string> allowed = { "token_embd", "output" };
    for (const auto & name : FN_BLOCK_NAMES) {
        allowed.insert(blk + name);
    }
    const std::string fused = blk + "ffn_gate_up_exps";
    const bool has_fused = head.tensors.count(fused + ".weight") > 0;
    allowed.insert(fused);

    std::vector<std::string> foreign;
    for (const auto & [name, ne1] : head.tensors) {
        const size_t dot = name.rfind('.');
        const std::string suffix = dot == std::string::npos ? "" : name.substr(dot + 1);
        const bool known = (suffix == "weight" || suffix == "scale" || suffix == "input_scale") && allowed.count(name.substr(0, dot)) > 0;
        if (!known) {
            foreign.push_back(name);
        }
        GGML_UNUSED(ne1);
    }

    std::vector<std::string> missing;
    for (const auto & name : FN_BLOCK_NAMES) {
        const bool in_fused = has_fused && (name == "ffn_gate_exps" || name == "ffn_up_exps");
        if (!in_fused && head.tensors.count(blk + name + ".weight") == 0) {
            missing.push_back(blk + name + ".weight");
        }
    }

    if (!foreign.empty()) {
        out.add("tensor-names", "the head has tensors that no MTP head of this model has: " + fn_join(foreign), blk + "*", foreign.front());
    }
    if (!missing.empty()) {
        out.add("tensor-names", "the head lacks " + fn_join(missing), missing.front());
    }
}

void fn_check_head(const fn_header & target, const fn_header & head, fn_refusal & out) {
    if (target.arch() != head.arch()) {
        out.add("architecture", "general.architecture differs", target.arch(), head.arch());
        return;
    }
    if (head.n_nextn() == 0) {
        out.add("no-mtp-block", "the draft file has no MTP block (nextn_predict_layers)", "1", "0");
        return;
    }
    if (head.n_nextn() != 1) {
        out.add("no-mtp-block", "one MTP block is supported (nextn_predict_layers)", "1", std::to_string(head.n_nextn()));
    }
    if (head.tensors.count("blk.0.hc_attn_norm.weight") > 0) {
        out.add("embedded-as-head", "the draft file holds a whole model beside its MTP block: give it as -m, without -md");
        return;
    }
    out.add_num("width", "embedding_length",       target.num_arch("embedding_length"),       head.num_arch("embedding_length"));
    out.add_num("width", "hyper_connection.count", target.num_arch("hyper_connection.count"), head.num_arch("hyper_connection.count"));
    out.add_num("block-numbering", "number of trunk blocks (block_count - nextn_predict_layers)", target.n_trunk(), head.n_trunk());
    fn_check_vocab(target, head, out);
    fn_check_tensors(head, out);
}

// the same file, or one of the same split set
bool fn_check_same(const std::string & target_path, const std::string & head_path, const fn_header & target, fn_refusal & out) {
    std::error_code ec;
    if (std::filesystem::equivalent(target_path, head_path, ec)) {
        if (target.n_nextn() > 0) {
            out.add("embedded-twice", "the target already holds its MTP block: leave out -md");
        } else {
            out.add("target-as-head", "the draft file is the target itself, which has no MTP block");
        }
        return true;
    }

    auto split_set = [](const std::string & path) {
        const std::filesystem::path p = std::filesystem::absolute(path).lexically_normal();
        const std::string name = p.filename().string();
        std::smatch m;
        return std::regex_match(name, m, std::regex("(.*)-\\d{5}(-of-\\d{5}\\.gguf)")) ? (p.parent_path() / (m[1].str() + m[2].str())).string() : "";
    };
    const std::string set = split_set(head_path);
    if (!set.empty() && set == split_set(target_path)) {
        out.add("target-shard", "the draft file is a shard of the target", target_path, head_path);
        return true;
    }

    return false;
}

}

bool fn_mtp_preflight(const common_params & params) {
    const auto & spec = params.speculative;

    if (std::find(spec.types.begin(), spec.types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP) == spec.types.end()) {
        return true;
    }

    const std::string & target_path = params.model.path;
    const std::string   head_path   = spec.has_dft() ? spec.draft.mparams.path : "";

    const auto target = fn_read_header(target_path);
    if (!target) {
        return true; // the loader reports it
    }

    fn_refusal refusal;

    if (head_path.empty()) {
        if (target->arch() == FN_ARCH && target->n_nextn() == 0) {
            refusal.add("no-mtp-block", "the target has no MTP block and no draft file (-md) was given", "0");
        }
    } else {
        const auto head = fn_read_header(head_path);
        if (!head) {
            refusal.add("unreadable", "the draft file is not a readable GGUF");
        } else if (target->arch() != FN_ARCH && head->arch() != FN_ARCH) {
            return true;
        } else if (!fn_check_same(target_path, head_path, *target, refusal)) {
            fn_check_head(*target, *head, refusal);
        }
    }

    if (refusal.reasons.empty()) {
        return true;
    }

    const common_json line = {
        { "reason", refusal.summary }, { "target", target_path }, { "head", head_path }, { "reasons", refusal.reasons },
    };
    LOG_ERR("fn:mtp:refused %s\n", line.dump_safe().c_str());

    return false;
}
