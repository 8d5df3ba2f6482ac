/* cuBLASLt for a CPU, as far as tprimat calls it: column-major products of bf16, fp32 and 8-bit numbers, summed in fp32.
 * Each of its eight algorithms computes the same. It refuses what the real one refuses: an address that an algorithm was not
 * asked for, 8-bit operands other than "TN", and shapes that do not match. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>

enum { INVALID = 7, NOT_SUPPORTED = 15 };
enum { FP32 = 0, BF16 = 14, E4M3 = 28, E5M2 = 29 };

typedef struct { int32_t transpose_a, transpose_b; const float *scale_a, *scale_b; int8_t fast; } Description;
typedef struct { int type; uint64_t rows, columns; int64_t leading; } Layout;
typedef struct { uint64_t workspace; uint32_t alignment[4]; } Preference;
typedef struct { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } Heuristic;

int last_algorithm = -1;

int cublasLtCreate(void **handle) { *handle = malloc(1); return 0; }

int cublasLtMatmulDescCreate(Description **made, int compute, int scale) {
    *made = calloc(1, sizeof(Description));
    return compute == 68 && scale == FP32 ? 0 : NOT_SUPPORTED;
}

int cublasLtMatmulDescSetAttribute(Description *d, int attribute, const void *value, size_t size) {
    switch (attribute) {
    case 3: if (size != 4) return INVALID; memcpy(&d->transpose_a, value, size); return 0;
    case 4: if (size != 4) return INVALID; memcpy(&d->transpose_b, value, size); return 0;
    case 17: if (size != 8) return INVALID; memcpy(&d->scale_a, value, size); return 0;
    case 18: if (size != 8) return INVALID; memcpy(&d->scale_b, value, size); return 0;
    case 25: if (size != 1) return INVALID; memcpy(&d->fast, value, size); return 0;
    }
    return INVALID;
}

int cublasLtMatrixLayoutCreate(Layout **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *made = malloc(sizeof(Layout));
    **made = (Layout){type, rows, columns, leading};
    return leading >= (int64_t)rows ? 0 : INVALID;
}

int cublasLtMatmulPreferenceCreate(Preference **made) {
    *made = malloc(sizeof(Preference));
    **made = (Preference){0, {256, 256, 256, 256}};
    return 0;
}

int cublasLtMatmulPreferenceSetAttribute(Preference *p, int attribute, const void *value, size_t size) {
    if (attribute == 1 && size == 8) { memcpy(&p->workspace, value, size); return 0; }
    if (attribute >= 5 && attribute <= 8 && size == 4) { memcpy(&p->alignment[attribute - 5], value, size); return 0; }
    return INVALID;
}

int cublasLtMatmulPreferenceDestroy(Preference *p) { free(p); return 0; }

static int eight_bits(int type) { return type == E4M3 || type == E5M2; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, Description *d, Layout *a, Layout *b, Layout *c, Layout *total, Preference *p,
                                   int most, Heuristic *found, int *count) {
    uint64_t m = d->transpose_a ? a->columns : a->rows, k = d->transpose_a ? a->rows : a->columns;
    uint64_t inner = d->transpose_b ? b->columns : b->rows, n = d->transpose_b ? b->rows : b->columns;
    int small = eight_bits(a->type);
    *count = 0;
    if (k != inner || m != total->rows || n != total->columns || c != total) return INVALID;
    if (small != eight_bits(b->type) || (small && (!d->transpose_a || d->transpose_b || !d->scale_a || !d->scale_b))) return 0;
    for (*count = 0; *count < most && *count < 8; ++*count) {
        memset(&found[*count], 0, sizeof(Heuristic));
        found[*count].algorithm[0] = *count;
        found[*count].algorithm[1] = p->alignment[0];
    }
    return 0;
}

static float value(const void *matrix, int type, int64_t place) {
    if (type == FP32) return ((const float *)matrix)[place];
    if (type == BF16) {
        uint32_t bits = (uint32_t)((const uint16_t *)matrix)[place] << 16;
        float number;
        memcpy(&number, &bits, 4);
        return number;
    }
    uint8_t bits = ((const uint8_t *)matrix)[place];
    int fraction_bits = type == E4M3 ? 3 : 2, bias = type == E4M3 ? 7 : 15;
    int exponent = (bits & 127) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
    float size = exponent ? ldexpf(fraction + (1 << fraction_bits), exponent - bias - fraction_bits)
                          : ldexpf(fraction, 1 - bias - fraction_bits);
    return bits & 128 ? -size : size;
}

static void store(void *matrix, int type, int64_t place, float number) {
    if (type == FP32) { ((float *)matrix)[place] = number; return; }
    uint32_t bits;
    memcpy(&bits, &number, 4);
    ((uint16_t *)matrix)[place] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

int cublasLtMatmul(void *handle, Description *d, const float *alpha, const void *a, Layout *at, const void *b, Layout *bt,
                   const float *beta, const void *c, Layout *ct, void *total, Layout *tt, const uint64_t *algorithm,
                   void *workspace, size_t workspace_bytes, void *stream) {
    if (((uintptr_t)a | (uintptr_t)b | (uintptr_t)total) % algorithm[1]) return INVALID;
    if (c != total || !workspace || workspace_bytes != 32 << 20 || (uintptr_t)stream != 4711) return INVALID;
    uint64_t inner = d->transpose_a ? at->rows : at->columns;
    float scale = *alpha * (d->scale_a ? *d->scale_a : 1) * (d->scale_b ? *d->scale_b : 1);
    for (uint64_t row = 0; row < tt->rows; ++row)
        for (uint64_t column = 0; column < tt->columns; ++column) {
            float sum = 0;
            for (uint64_t i = 0; i < inner; ++i)
                sum += value(a, at->type, d->transpose_a ? i + row * at->leading : row + i * at->leading) *
                       value(b, bt->type, d->transpose_b ? column + i * bt->leading : i + column * bt->leading);
            int64_t place = row + column * tt->leading;
            store(total, tt->type, place, scale * sum + (*beta ? *beta * value(total, tt->type, place) : 0));
        }
    last_algorithm = algorithm[0];
    return 0;
}
