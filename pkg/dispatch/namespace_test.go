package dispatch

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/fairshare"
)

func TestParseNamespace(t *testing.T) {
	type keys = map[string]string
	terms := func(weight int64) fairshare.Terms {
		terms := fairshare.DefaultTerms
		terms.Weight = weight
		return terms
	}
	for name, test := range map[string]struct {
		labels, annotations keys
		want                Namespace
		problem             string
	}{
		"nothing is set":        {keys{"team": "red"}, keys{"a": "b"}, Namespace{Tenant: "red", Terms: terms(1)}, ""},
		"a weight":              {nil, keys{"gpushare.aliyun.com/fair-share-weight": "2"}, Namespace{Terms: terms(2)}, ""},
		"an unknown label":      {keys{"gpushare.aliyun.com/fair-share-tenant": "x"}, nil, Namespace{Terms: terms(1)}, "nothing reads the label gpushare.aliyun.com/fair-share-tenant"},
		"it takes no part":      {keys{"gpushare.aliyun.com/fair-share": "off"}, nil, Namespace{Terms: terms(1), Exempt: true}, ""},
		"off is spelt wrongly":  {keys{"gpushare.aliyun.com/fair-share": "Off"}, nil, Namespace{Terms: terms(1)}, `label gpushare.aliyun.com/fair-share: "Off" is not "off"`},
		"a label as annotation": {nil, keys{"gpushare.aliyun.com/fair-share": "off"}, Namespace{Terms: terms(1)}, "nothing reads the annotation gpushare.aliyun.com/fair-share: it must be set as label"},
		"annotations as labels, and a misspelt annotation": {
			keys{"gpushare.aliyun.com/fair-share-weight": "2"}, keys{"gpushare.aliyun.com/fair-share-guarantee": "32"}, Namespace{Terms: terms(1)},
			"nothing reads the annotation gpushare.aliyun.com/fair-share-guarantee; nothing reads the label gpushare.aliyun.com/fair-share-weight: it must be set as annotation",
		},
		"a value that can't be read": {nil, keys{"gpushare.aliyun.com/fair-share-weight": "0"}, Namespace{Terms: terms(1)}, `annotation gpushare.aliyun.com/fair-share-weight: "0" is not a whole number from 1 to 1000000`},
	} {
		got, problem := ParseNamespace("ns", test.labels, test.annotations, "team")
		if got != test.want || problem != test.problem {
			t.Errorf("%s: %+v, %q", name, got, problem)
		}
	}
	if _, problem := ParseNamespace("ns", keys{"gpushare.aliyun.com/fair-share-tenant": "x"}, nil, "gpushare.aliyun.com/fair-share-tenant"); problem != "" {
		t.Errorf("the label that names the tenant: %q", problem)
	}
}
